"""Recipes that people, generators and accidents write."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fitune.recipe.recipe import ALIASES, Recipe
from fuzz.hostile import TEXTS, VALUES, damaged

pytestmark = pytest.mark.fuzz

KEYS = st.sampled_from(sorted({*Recipe.model_fields, *ALIASES}))
RIGHT = """\
model: meta-llama/Llama-3.1-8B
gpu: rtx-4090
gpus: 2
tuning: lora
data:
  - {path: rows.jsonl, format: messages, weight: 2}
lora_r: 16
learning_rate: 1e-4
seq_len: 4096
gradient_accumulation_steps: 4
num_epochs: 3
save_steps: 0.1
output_dir: runs/x
"""


@given(st.dictionaries(st.one_of(KEYS, TEXTS), VALUES, max_size=4))
def test_random_settings(orderly, tmp_path_factory, odd):
    recipe = {**yaml.safe_load(RIGHT), **odd}
    _plan(
        orderly, tmp_path_factory, yaml.safe_dump(recipe, allow_unicode=True).encode("utf-8", "surrogatepass")
    )


@given(damaged(RIGHT.encode()))
def test_damaged_text(orderly, tmp_path_factory, content):
    _plan(orderly, tmp_path_factory, content)


@given(KEYS, VALUES)
def test_settings_as_options(orderly, key, value):
    text = str(value).encode("utf-8", "replace").decode().replace("\0", "")  # no command line carries these
    orderly("plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", f"--{key}={text}")


def _plan(orderly, tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "recipe.yaml"
    file.write_bytes(content)
    orderly("plan", str(file))
