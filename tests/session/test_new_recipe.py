"""A first recipe: questions, their answers, and the file."""

from dataclasses import replace
from pathlib import Path

import pytest

from fitune.errors import DataError, RecipeError
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.recipe.strict_yaml import parse_value
from fitune.session.planning import plan_for
from fitune.session.recipes.new_recipe import (
    QUESTIONS,
    ask_and_write,
    asked_keys,
    explain_new_recipe,
    recipe_text,
    write_recipe,
)
from fitune.session.recipes.reading import read_any_recipe

GIVEN = {"model": "meta-llama/Llama-3.1-8B", "data": "rows.jsonl", "tuning": "lora", "gpu": "rtx-4090"}


def test_nobody_is_asked_when_all_is_given():
    keys = asked_keys({**GIVEN, "output_dir": "auto", "cutoff_len": 512}, ask=None, say=print)
    assert keys == {**GIVEN, "seq_len": 512}
    given = {
        "base_model": "a",
        "dataset": "b",
        "finetuning_type": "lora",
        "gpu": "auto",
    }  # as others name them
    assert asked_keys(given, ask=None, say=print) == {"model": "a", "data": "b", "tuning": "lora"}


def test_data_that_is_not_there_is_refused_where_nobody_is_asked(tmp_path):
    words = [word for key, value in GIVEN.items() for word in (f"--{key}", value)]
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        ask_and_write([str(tmp_path / "recipe.yaml"), *words], overwrite=False, ask=None, say=print)


def test_without_a_terminal_what_has_no_usual_answer_is_needed():
    with pytest.raises(RecipeError) as caught:
        asked_keys({"tuning": "lora"}, ask=None, say=print)
    assert "it needs --model and --data" in str(caught.value)
    assert caught.value.hint == "add --model NAME --data NAME"
    assert asked_keys({"model": "a", "data": "b"}, ask=None, say=print).keys() == {"model", "data"}


def test_an_answer_that_no_recipe_can_have_is_asked_for_again(tmp_path, data_file):
    answers = iter(
        [
            "", "llama", "meta-llama/Llama-3.1-8B", str(tmp_path / "none.jsonl"), str(data_file), "best", "",
            "2 x rtx-9999", "2 x rtx-3090", "runs/here",
        ]
    )  # fmt: skip
    said = []
    keys = asked_keys({}, ask=lambda _text: next(answers), say=said.append)
    assert keys == {
        "model": "meta-llama/Llama-3.1-8B", "data": str(data_file), "gpu": "rtx-3090", "gpus": 2,
        "output_dir": "runs/here",
    }  # fmt: skip
    assert len(said) == 4
    assert not list(answers)


def test_the_file_says_what_was_asked_for_and_no_more(tmp_path):
    rows = tmp_path / "a row's file.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "new" / "recipe.yaml"
    keys = {**GIVEN, "data": str(rows), "lora_target_modules": ["q_proj", "v_proj"], "seq_len": 512}
    report = write_recipe(path, keys)
    recipe = read_any_recipe(path)
    assert recipe.model_dump(exclude_unset=True).keys() == keys.keys()
    assert recipe.data[0].path == str(rows)
    assert report.chosen.plan.batch.seq_len == recipe.seq_len == 512
    text = path.read_text()
    assert all(f"\n{question.key}: " in text or f"\n# {question.key}:" in text for question in QUESTIONS)


def test_commands_for_a_file_with_a_space_can_be_pasted(tmp_path):
    path = tmp_path / "my recipe.yaml"
    report = write_recipe(path, {"model": "openai-community/gpt2", "gpu": "rtx-4090", "tuning": "lora"})
    for text in (explain_new_recipe(path, report), path.read_text()):
        assert f"fitune plan '{path}'" in text
        assert f"fitune train '{path}'" in text


@pytest.mark.parametrize("name", ["a\nmodel: x.yaml", "a\udcff.yaml", f"{'a' * 300}.yaml"])
def test_a_name_that_no_comment_can_hold_is_refused_before_anything_is_asked(tmp_path, name):
    with pytest.raises(RecipeError, match="contains a|has 305 bytes"):
        ask_and_write([str(tmp_path / name)], overwrite=False, ask=None, say=print)
    assert not list(tmp_path.iterdir())


def test_a_recipe_that_is_there_is_not_replaced_unasked(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("mine")
    words = [str(path), *(word for key, value in GIVEN.items() for word in (f"--{key}", value))]
    with pytest.raises(RecipeError, match="is there already"):
        ask_and_write(words, overwrite=False, ask=None, say=print)
    assert path.read_text() == "mine"


def test_a_line_that_is_switched_on_changes_nothing():
    lines = recipe_text(Path("r.yaml"), {"model": "a"}).splitlines()[3:]
    switched = [line.removeprefix("# ") for line in lines if ":" in line]
    keys = canonical_keys(parse_value("\n".join(switched), where="r.yaml"), where="r.yaml")
    assert parse_recipe(keys) == parse_recipe({"model": "a"})


def test_the_plan_that_is_told_is_one_that_trains(tmp_path):
    """The fastest plan of these settings is only planned (docs/planning.md)."""
    report = plan_for(
        parse_recipe({"model": "qwen3-8b", "gpu": "rtx-3090", "gpus": 2, "tuning": "lora"}),
    )
    assert report.trained is not None
    alone = replace(report, trained=None)
    told, of_trained, of_chosen = (
        explain_new_recipe(tmp_path / "r.yaml", each).partition("output")[0]
        for each in (report, replace(alone, chosen=report.trained), alone)
    )
    assert told == of_trained != of_chosen


@pytest.mark.parametrize(
    ("words", "held_out"),
    [([], 0.05), (["--val-fraction", "0"], 0), (["--eval-data", "DATA"], 0)],
    ids=["by itself", "none", "other rows"],
)
def test_a_new_recipe_holds_rows_out_unless_it_says_otherwise(tmp_path, data_file, words, held_out):
    given = ["--model", GIVEN["model"], "--data", "DATA", "--gpu", "rtx-4090", "--tuning", "qlora", *words]
    file = tmp_path / "new.yaml"
    given = [str(data_file) if word == "DATA" else word for word in given]
    ask_and_write([str(file), *given], overwrite=False, ask=None, say=print)
    recipe = read_any_recipe(file)
    assert (recipe.val_fraction, bool(recipe.eval_data)) == (held_out, "--eval-data" in words)
