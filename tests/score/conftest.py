"""A tiny random model with its own tokenizer and template, in a folder and loaded."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fitune.data.conversations.templates import ChatTemplate, load_template
from fitune.demo.files import training_exercises, write_base_model
from fitune.models.tokens import load_tokenizer
from fitune.values.plan import DataSource
from models.tiny_models import load
from score.scorings import plan_for, quietly, write_data

TINY = dict(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=192,
)


@dataclass(frozen=True)
class Tiny:
    folder: Path
    model: Any
    tokenizer: Any
    template: ChatTemplate


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_base_model(folder, [row["prompt"] for row in training_exercises(200, seed=0)], shape=TINY, seed=0)
    tokenizer = load_tokenizer(str(folder))
    model = load(folder)
    return Tiny(folder, model, tokenizer, load_template(tokenizer))


@pytest.fixture
def plan(tiny, tmp_path):
    data = DataSource(path=str(write_data(tmp_path / "rows.jsonl")))
    return plan_for(tiny.folder, data, tmp_path / "out")


@pytest.fixture(scope="module")
def finished_once(tiny, tmp_path_factory):
    """The directory of a run of the plan below."""
    folder = tmp_path_factory.mktemp("finished")
    data = DataSource(path=str(write_data(folder / "rows.jsonl")))
    quietly(plan_for(tiny.folder, data, folder / "out"))
    return folder / "out"


@pytest.fixture
def finished(plan, finished_once):
    """The plan, with its directory as a run left it."""
    shutil.copytree(finished_once, plan.output_dir)
    return plan
