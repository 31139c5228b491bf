"""Laws: what convert writes is read back as the same recipe; the commands take another trainer's recipe as it is."""

from pathlib import Path

import pytest
import yaml

import fitune
from fitune.errors import RecipeError
from fitune.recipe.foreign import trainer_of
from fitune.recipe.foreign.reading import Reading, recipe_with_comments
from fitune.session.recipes.reading import convert_recipe, read_any_recipe
from recipe.foreign.examples import published_examples, read_keys, typed


def test_a_converted_recipe_is_the_same_recipe(tmp_path):
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    converted = 0
    for number, example in enumerate(published_examples()):
        if number % 7:
            continue
        theirs.write_text(yaml.safe_dump(example.keys, sort_keys=False))
        try:
            text, data = convert_recipe(theirs)
        except RecipeError:
            continue
        ours.write_text(text)
        assert data["recipe"].keys() == yaml.safe_load(text).keys()
        assert trainer_of(yaml.safe_load(text)) is None, example.name
        one, other = (read_any_recipe(file, options={"gpus": 8}, settings=()) for file in (ours, theirs))
        assert one == other, example.name
        converted += 1
    assert converted > 20


def test_fitunes_own_recipes_are_not_taken_for_others(tmp_path):
    own = Path(__file__).parents[3] / "recipes"
    assert len(list(own.glob("*.yaml"))) > 5
    for path in own.glob("*.yaml"):
        assert trainer_of(yaml.safe_load(path.read_text(encoding="utf-8"))) is None, path
    path = tmp_path / "own.yaml"
    path.write_text("model: gpt2\ntuning: lora\n")
    with pytest.raises(RecipeError, match="not recognised"):
        convert_recipe(path)


def test_python_and_files_read_the_same(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"{{{AXOLOTL}lora_r: 8, lora_alpha: 16, lora_target_linear: true, learning_rate: 1.0e-4, bf16: auto}}"
    )
    plan = fitune.plan(yaml.safe_load(path.read_text()), gpu="4090").chosen.plan
    assert plan == fitune.plan(path, gpu="4090").chosen.plan
    assert plan.batch.seq_len == 512


def test_one_key_may_not_be_set_twice():
    reading = Reading(trainer="t", where="t", raw={"a": 1, "b": 2}, folder=Path("."))
    reading.same({"a": "seq_len", "b": "seq_len"})
    assert [line.key for line in reading.of("refused")] == ["b"]


def test_another_task_is_not_told_to_leave_a_key_out(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "{base_model: gpt2, rl: dpo, datasets: [{path: org/d, type: chatml.intel}], sequence_len: 512, "
        "micro_batch_size: 1}"
    )
    with pytest.raises(RecipeError) as caught:
        convert_recipe(path)
    assert "datasets[0] would change the result: type: chatml.intel" in caught.value.message
    assert caught.value.hint == "a recipe of supervised fine-tuning with data for it"


def test_a_template_in_a_converted_recipe_is_a_text_of_several_lines(tmp_path):
    path = tmp_path / "theirs.yaml"
    kind = "{format: 'Q: {instruction}', no_input_format: 'Q: {instruction}'}"
    path.write_text(
        f"base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 1\ndatasets: [{{path: org/d, type: {kind}}}]\n"
    )
    text, _ = convert_recipe(path)
    assert "\nchat_template: |\n  {{- bos_token" in text
    (tmp_path / "ours.yaml").write_text(text)
    assert read_any_recipe(tmp_path / "ours.yaml") == read_any_recipe(path)


def test_rows_that_are_refused_may_be_replaced_by_others():
    kind = {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction}"}
    keys = typed(f"{AXOLOTL}learning_rate: 1.0e-4") | {"datasets": [{"path": "d", "type": kind}]}
    others = "other rows in their place: --data FILE --columns prompt=question,completion=answer"
    for more, said, hint in (
        ({}, r"datasets\[0\] would change the result", others),
        ({"never_seen": 1}, "unknown key", f"{others}; leave the others out to train without"),
        ({"datasets": [{"path": "d", "type": "alpaca", "never_seen": 1}]}, "unknown key",
         "leave it out to train without"),
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=said) as caught:
            read_keys(keys | more)
        assert caught.value.hint == hint
    read = read_keys(keys, data="org/other", columns={"prompt": "q", "completion": "a"})
    assert [each.path for each in read.data] == ["org/other"]
    with pytest.raises(RecipeError, match="rl: dpo"):
        read_keys(keys | {"rl": "dpo"}, data="org/other")


TRL = "model_name_or_path: gpt2, dataset_name: org/d, use_peft: true, "
AXOLOTL = (
    "base_model: gpt2, datasets: [{path: org/d, type: alpaca}], sequence_len: 512, adapter: lora, "
    "micro_batch_size: 1, "
)


@pytest.mark.parametrize(
    ("theirs", "pushed", "public"),
    [
        (f"{TRL}push_to_hub: true, output_dir: out/my-run/", "my-run", False),
        (f"{TRL}push_to_hub: true, hub_model_id: me/x, hub_private_repo: false", "me/x", True),
        (f"{TRL}push_to_hub: false, hub_model_id: me/x, hub_private_repo: false", "", False),
        (f"{AXOLOTL}hub_model_id: me/x, hub_strategy: end", "me/x", False),
    ],
)
def test_what_went_to_the_hub_goes_there(tmp_path, theirs, pushed, public):
    path = tmp_path / "theirs.yaml"
    path.write_text(f"{{{theirs}}}")
    ours = yaml.safe_load(convert_recipe(path)[0])
    assert (ours.get("push_to_hub", ""), ours.get("hub_public", False)) == (pushed, public)


@pytest.mark.parametrize("text", ["two\nlines", "x " * 6_000, "tail\n", "# no comment\n\n  at all"])
def test_a_comment_is_never_a_part_of_a_value(text):
    keys = {"model_name_or_path": "gpt2", "dataset_name": "org/d", "use_peft": True, "run_name": text,
            "output_dir": text}  # fmt: skip
    reading = Reading(trainer="TRL", where="theirs\nyaml", raw=keys, folder=Path("."))
    reading.put("output_dir", text, key="output_dir", said="said in\ntwo lines")
    written = recipe_with_comments(reading, {"output_dir": text, "seed": 3})
    assert yaml.safe_load(written) == {"output_dir": text, "seed": 3}
    assert "as in TRL: said in two lines" in written
