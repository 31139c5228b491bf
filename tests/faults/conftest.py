"""The command line inside the test's process: exit code, standard output, standard error."""

import pytest

from conftest import settings_of
from runs import set_words


@pytest.fixture
def train(call, model_folder, data_file, tmp_path):
    """``fitune train`` of two steps; keywords are settings on top, words are further options."""
    return lambda *words, **others: call(
        "train", *set_words(settings_of(model_folder, data_file, tmp_path / "run", **others)), *words
    )
