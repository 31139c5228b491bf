"""The command line inside the test's process: exit code, standard output, standard error."""

import pytest

from runs import set_words


@pytest.fixture
def train(call, settings):
    """``fitune train`` of two steps; keywords are settings on top, words are further options."""
    return lambda *words, **others: call("train", *set_words(settings | others), *words)
