"""Relative paths of a recipe are those of its folder, of the shell's where nothing is there; a run's hold anywhere."""

from pathlib import Path

import pytest
import yaml

from fitune.checkpoint.resume import compare_plans
from fitune.errors import RecipeError
from fitune.planner.defaults import data_of
from fitune.recipe.recipe import dump_recipe, parse_recipe
from fitune.session.recipes.reading import read_any_recipe, recipe_from
from fitune.values.plan import RunPlan
from fitune.values.run_directory import moved, placed
from plans import known, plan_for

KEYS = {"model": "m/base", "data": ["rows.jsonl#5", {"path": "more/*.jsonl"}], "chat_template": "t.jinja"}


@pytest.fixture
def files(tmp_path):
    """A recipe and what it names, in a folder of their own, and the shell in another."""
    for name in ("m/base/config.json", "rows.jsonl", "more/a.jsonl", "t.jinja", "ds.json"):
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text("{}")
    (tmp_path / "own" / "r.yaml").write_text(yaml.safe_dump(KEYS))
    (tmp_path / "shell").mkdir()
    return tmp_path


def paths(recipe):
    return [recipe.model, *(source.path for source in recipe.data), recipe.chat_template]


def test_a_recipe_is_read_from_any_folder(files, monkeypatch):
    wanted = [str(files / "own" / name) for name in ("m/base", "rows.jsonl#5", "more/*.jsonl", "t.jinja")]
    monkeypatch.chdir(files / "shell")
    for path in (files / "own" / "r.yaml", Path("../own/r.yaml")):
        for recipe in (read_any_recipe(path), recipe_from([str(path)], [])):
            assert [str(Path(each).resolve()) for each in paths(recipe)] == wanted
    monkeypatch.chdir(files / "own")
    assert paths(read_any_recipe(Path("r.yaml"))) == [
        "m/base",
        "rows.jsonl#5",
        "more/*.jsonl",
        "t.jinja",
    ]
    dumped = parse_recipe(yaml.safe_load(dump_recipe(read_any_recipe(Path("r.yaml")), anywhere=True)))
    assert paths(dumped) == wanted


def test_what_is_in_the_shells_folder_alone_is_found_there(files, monkeypatch):
    monkeypatch.chdir(files / "own")
    other = files / "shell" / "r.yaml"
    other.write_text("model: m/base\ndata: rows.jsonl\n")
    assert [read_any_recipe(other).model, read_any_recipe(other).data[0].path] == [
        "m/base",
        "rows.jsonl",
    ]
    (files / "shell" / "rows.jsonl").write_text("{}")
    assert read_any_recipe(other).data[0].path == str(files / "shell" / "rows.jsonl")
    assert recipe_from([str(other), "--data", "rows.jsonl"], []).data[0].path == "rows.jsonl"


def test_a_template_inside_the_recipe_is_no_path(files, monkeypatch):
    monkeypatch.chdir(files / "shell")
    text = "{% for m in messages %}\n/**/{{ m.content[0] }}" + "x" * 5_000 + "{% endfor %}"
    (files / "own" / "r.yaml").write_text(yaml.safe_dump(KEYS | {"chat_template": text}))
    read = read_any_recipe(files / "own" / "r.yaml")
    assert read.chat_template == text
    assert parse_recipe(yaml.safe_load(dump_recipe(read, anywhere=True))).chat_template == text


def test_a_name_on_the_hub_is_no_folder_without_a_model_in_it(files):
    (files / "own" / "gpt2").mkdir()
    file = files / "own" / "r.yaml"
    file.write_text("model: gpt2\ndata: owner/rows")
    assert (read_any_recipe(file).model, read_any_recipe(file).data[0].path) == (
        "gpt2",
        "owner/rows",
    )


@pytest.mark.parametrize("keys", ["model: a/b/c", "model: ./b"])
def test_a_file_that_is_nowhere_is_refused_with_both_folders(files, monkeypatch, keys):
    monkeypatch.chdir(files / "shell")
    (files / "own" / "r.yaml").write_text(keys)
    with pytest.raises(RecipeError) as caught:
        recipe_from([str(files / "own" / "r.yaml")], [])
    assert (
        f"neither in the recipe's folder, {files / 'own'}, nor in the present one, {files / 'shell'}"
        in str(caught.value)
    )


def test_the_plan_in_a_run_holds_anywhere_and_moves_with_what_it_needs(files, monkeypatch):
    monkeypatch.chdir(files / "own")
    plan = plan_for(
        known("llama-3.1-8b"), model_path="m/base", data=data_of(parse_recipe({**KEYS})),
        run=RunPlan(output_dir="runs/a"),
    )  # fmt: skip
    stored = placed(plan)
    assert not [one for one in compare_plans(stored, plan) if not one.allowed]
    monkeypatch.chdir(files / "shell")
    assert stored.model_path == str(files / "own" / "m/base")
    assert moved(stored, files / "own" / "runs" / "a") == stored
    (files / "own").rename(files / "elsewhere")
    there = moved(stored, files / "elsewhere" / "runs" / "a")
    assert there.model_path == str(files / "elsewhere" / "m/base")
    assert [source.path for source in there.data.sources] == [
        str(files / "elsewhere" / name) for name in ("rows.jsonl#5", "more/*.jsonl")
    ]
