"""The command line inside the test's process, and runs that are complete: trained once, copied for each test."""

import shutil
from pathlib import Path

import pytest

import fitune
from conftest import settings_of
from runs import set_words


@pytest.fixture
def train(call, model_folder, data_file, tmp_path):
    """``fitune train`` of two steps; keywords are settings on top, words are further options."""
    return lambda *words, **others: call(
        "train", *set_words(settings_of(model_folder, data_file, tmp_path / "run", **others)), *words
    )


@pytest.fixture(scope="session")
def saved_run(model_folder, data_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    fitune.train(**settings_of(model_folder, data_file, folder, save_steps=1))
    return folder


@pytest.fixture
def saved(saved_run, tmp_path):
    """A complete run of ``train(save_steps=1)``, with both of its checkpoints."""
    return Path(shutil.copytree(saved_run, tmp_path / "run", symlinks=True))
