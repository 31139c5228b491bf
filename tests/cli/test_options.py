"""Words of the command line to a recipe."""

from pathlib import Path

import pytest
from typer import Context
from typer.main import get_command

from fitune.cli.app import app
from fitune.errors import RecipeError
from fitune.planner.defaults import data_of
from fitune.recipe.job import read_job_settings
from fitune.recipe.score_recipe import ScoreRecipe, options_of
from fitune.session.planning import plan_on_data
from fitune.session.recipes.reading import recipe_from, split_words


def recipe(words, *settings):
    """What this line says, of a model that is of no account."""
    words = words.split() if isinstance(words, str) else words
    return recipe_from(["--model=m", *words], settings)


TEXTS = ["run #3", "007", "no", "2026-11-24", "a: b", "[a", "1_0", "~"]


@pytest.mark.parametrize("key", ["model", "gpu", "run_name"])
def test_a_key_that_takes_a_text_has_the_text_that_was_typed(key):
    """YAML ends a text at ` #`, and reads numbers, dates and switches."""
    model = [] if key == "model" else ["--model=m"]
    for text in TEXTS:
        for words, settings in (([f"--{key}", text], []), ([f"--{key}={text}"], []), ([], [f"{key}={text}"])):
            assert getattr(recipe_from([*model, *words], settings), key) == text


def test_texts_inside_lists_and_mappings_are_as_typed_too():
    words = ["--data", "a #1.jsonl", "--added-tokens", "#no,007", "--report-to", "[wandb, mlflow]"]
    given = recipe(words, "columns.prompt=no", "data.split=007", "data.sample=5")
    assert (given.data[0].path, given.data[0].split, given.data[0].sample) == ("a #1.jsonl", "007", 5)
    assert (given.added_tokens, given.report_to) == (["#no", "007"], ["wandb", "mlflow"])
    assert given.columns == {"prompt": "no"}
    for text, resume in (("no", False), ("1", True), ("a #1", "a #1")):
        assert recipe([f"--resume={text}"]).resume == resume
    given = recipe("", "data=[a.jsonl, {path: b.csv}]", "data.1.path=c #2.csv", "gpu=null")
    assert ([source.path for source in given.data], given.gpu) == (["a.jsonl", "c #2.csv"], None)


def test_a_jobs_texts_are_as_typed_too():
    typed = "ray_version=2.50 name=007 image=a/b:1.10 node_selector.zone=010 extra_resources.rdma/hca=1"
    job = read_job_settings(None, settings=typed.split())
    assert (job.ray_version, job.name, job.image) == ("2.50", "007", "a/b:1.10")
    assert (job.node_selector, job.extra_resources) == ({"zone": "010"}, {"rdma/hca": 1})


@pytest.mark.parametrize("key", ["--seq-len", "--data a --data"])
def test_a_key_without_its_value_is_named(key):
    with pytest.raises(RecipeError, match=f"{key.split()[-1]} has no value"):
        split_words(["--model", "m", *key.split()])


def test_options_win_over_settings_and_settings_over_the_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("model: a\nlora_r: 4\nseq_len: 128\nseed: 1\n")
    recipe = recipe_from([str(file), "--seq-len", "512"], ["seq_len=256", "lora_r=8"])
    assert (recipe.model, recipe.lora_r, recipe.seq_len, recipe.seed) == ("a", 8, 512, 1)


def test_several_sources_are_named_one_after_another():
    given = recipe("--data a.jsonl --data b.csv#5 --data-weights 2,1")
    assert [source.path for source in given.data] == ["a.jsonl", "b.csv#5"]
    assert given.data_weights == [2.0, 1.0]


@pytest.mark.parametrize(
    ("typed", "setting", "value"),
    [
        ("--num-gpus 2", "gpus", 2),
        ("--cutoff_len 77", "seq_len", 77),
        ("--vram 24GiB", "gpu_memory", 24 * 2**30),
    ],
)
def test_words_that_people_try_first_are_understood(typed, setting, value):
    assert getattr(recipe(typed), setting) == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--save-strategy epoch", "saves_per_epoch"),
        ("--qlora", "tuning: qlora"),
        ("--verbose", "fitune plan --help lists every key"),
        ("a.yaml b.yaml", "two recipes"),
        ("--model b", "given twice\n  try: keep one of them"),
        ("--added-tokens a --added-tokens b", "given twice\n  try: --added-tokens A,B names both"),
    ],
)
def test_a_key_of_others_and_mistakes_are_refused_with_what_to_do(typed, said):
    with pytest.raises(RecipeError) as caught:
        recipe(typed)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "path", "options"),
    [
        (
            "--seq-len 4096 r.yaml --learning_rate=1e-4 --packing", "r.yaml",
            {"seq_len": 4096, "learning_rate": "1e-4", "packing": True},
        ),
        ("--resume r.yaml", "r.yaml", {"resume": True}),
        ("--packing r.yaml", "r.yaml", {"packing": True}),
        ("--packing off r.yaml", "r.yaml", {"packing": False}),
        ("--resume runs/a/checkpoints/step-4 r.yaml", "r.yaml", {"resume": "runs/a/checkpoints/step-4"}),
        ("--gradient-checkpointing 3 r.yaml", "r.yaml", {"gradient_checkpointing": 3}),
        ("--output-dir odd.yaml", None, {"output_dir": "odd.yaml"}),
    ],
)  # fmt: skip
def test_a_path_and_options_in_any_order_and_a_switch_does_not_swallow_the_recipe(words, path, options):
    assert split_words(words.split()) == (Path(path) if path else None, options)


def test_columns_of_other_names_are_an_option():
    """As ``fitune score`` takes them; a source that names its own keeps them."""
    words = ["--data", "a.csv", "--columns"]
    wanted = {"prompt": "question, in full", "completion": "reply"}
    for typed in (
        ["prompt=question, in full", "--columns", "completion=reply"],
        ["prompt=question, in full,completion=reply"],
    ):
        assert recipe([*words, *typed]).columns == wanted
    own = ["data.columns.prompt=q", "data.columns.completion=r"]
    sources = data_of(recipe([*words, "prompt=question,completion=reply"], *own)).sources
    assert [dict(source.columns) for source in sources] == [{"prompt": "q", "completion": "r"}]
    with pytest.raises(RecipeError, match="'question' is not role=column"):
        recipe([*words, "question"])


def test_data_that_is_elsewhere_is_said_in_the_plan(monkeypatch):
    words = ["--model", "gpt2", "--gpu", "h100", "--tuning", "lora", "--data", "owner/rows"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = plan_on_data(recipe_from(words, []))
    assert report.run is None
    assert report.decisions[-1].startswith("note on data: owner/rows: not all of it is on this machine")


def test_a_key_of_a_score_recipe_is_an_option_of_fitune_score():
    """Its help, default and values are those of the key, and its other names are taken."""
    command = get_command(app).commands["score"]
    options = {param.name: param for param in command.get_params(Context(command))}
    assert [*options][: len(ScoreRecipe.model_fields)] == [*ScoreRecipe.model_fields]
    for name, field in ScoreRecipe.model_fields.items():
        option = options[name]
        assert option.help == field.description
        assert option.required == field.is_required()
        assert option.multiple == isinstance(field.default, tuple | dict), name
        assert option.default == field.default or option.multiple or option.required, name
        assert [*options_of(name)] == option.opts
    assert options["out"].opts == ["--out", "--output-dir"]
    assert options["graders"].opts == ["--grader"]
