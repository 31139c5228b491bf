"""The demo's folder: a model every tool can load, rows fitune can read, recipes fitune can run."""

import builtins

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from fitune.demo import files
from fitune.demo.files import (
    FULL,
    HELD_OUT_ROWS,
    LORA,
    PRETRAIN,
    PRETRAINING_TEXTS,
    TRAINING_ROWS,
    let_values_pass,
    recipe_text,
    write_demo,
)
from fitune.session.recipes.reading import read_any_recipe
from jsonl import read_lines


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo") / "one", seed=1)


@pytest.fixture(scope="module")
def tokenizer(demo):
    return AutoTokenizer.from_pretrained(demo.start)


def test_deepspeed_is_told_where_it_runs_before_it_is_imported(tmp_path, monkeypatch):
    """It looks, and warns of what it finds, when it is imported first: by transformers, which saves the model.
    That nothing imports it earlier is seen in tests/several.py, in a new process."""
    happened, real = [], builtins.__import__

    def noticed(name, *others, **words):
        if name == "deepspeed":
            happened.append("imported")
        return real(name, *others, **words)

    monkeypatch.setattr(files, "tell_deepspeed_where", lambda *, has_gpu: happened.append("told"))
    monkeypatch.setattr(builtins, "__import__", noticed)
    files.write_base_model(tmp_path, ["One text."], shape=files.SHAPE, seed=1)
    assert happened[0] == "told"


def test_the_same_seed_writes_the_same_bytes_and_no_library_prints(demo, tmp_path, capfd):
    transformers_logging.enable_progress_bar()
    again = write_demo(tmp_path / "one", seed=1)
    assert capfd.readouterr() == ("", "")
    first, second = demo.start.parent, again.start.parent
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(second)) for path in second.rglob("*") if path.is_file())
    for name in names:
        if not name.endswith(".yaml"):  # those name their folder
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_the_base_model_is_a_small_llama(demo, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(demo.start)
    assert model.config.model_type == "llama"
    assert 2e6 < model.num_parameters() < 4e6
    assert len(tokenizer) <= model.config.vocab_size <= 1024
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert not any(path.suffix in (".bin", ".pt") for path in demo.start.iterdir())


@pytest.mark.parametrize(
    "text",
    ["  two  spaces\n\ttab", "naïve Zürich — 漢字 🙂 עברית", "3+4=7, 1,234.50"],
)
def test_the_tokenizer_gives_every_text_back(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_rows_are_written_as_counted(demo):
    texts, train, test = read_lines(demo.pretrain_text), read_lines(demo.train), read_lines(demo.test)
    assert (len(texts), len(train), len(test)) == (PRETRAINING_TEXTS, TRAINING_ROWS, HELD_OUT_ROWS)
    assert all(set(row) == {"text"} for row in texts)
    assert all(set(row) == {"id", "prompt", "completion"} for row in train + test)


def test_the_recipes_are_recipes(demo):
    paths = (demo.pretrain_recipe, demo.lora_recipe, demo.full_recipe)
    pretrain, lora, full = recipes = [read_any_recipe(path) for path in paths]
    for recipe, training in zip(recipes, (PRETRAIN, LORA, FULL), strict=True):
        settings = recipe.model_dump()
        assert {name: settings[name] for name in training} == training
        assert (recipe.seq_len, recipe.precision, recipe.micro_batch_size) == (256, "fp32", 2)
    assert pretrain.model == str(demo.start)
    assert lora.model == full.model == "base/model"  # from the recipe's folder, once the base is trained
    assert str(demo.base).startswith(pretrain.output_dir)
    assert lora.data[0].path == full.data[0].path == str(demo.train)
    assert len({recipe.output_dir for recipe in recipes}) == 3


def test_a_recipe_survives_any_folder_name(tmp_path):
    path = tmp_path / "recipe.yaml"
    odd = "it's: a #folder, [really]"
    path.write_text(recipe_text({**LORA, "model": odd, "data": odd, "output_dir": odd}, "p", path))
    recipe = read_any_recipe(path)
    assert (recipe.model, recipe.data[0].path, recipe.output_dir) == (odd, odd, odd)


def test_attention_begins_as_a_copy():
    value, output = torch.empty(12, 12), torch.empty(12, 12)
    let_values_pass(value, output)
    torch.testing.assert_close(output @ value, torch.eye(12), atol=1e-5, rtol=0)
