"""What another choice would cost, and how far one can go."""

import pytest

from fitune.errors import NothingFits, RecipeError
from fitune.planner.first_screen import changed_recipe
from fitune.planner.search import find_plan
from fitune.planner.study import largest
from fitune.session.alternatives import largest_for, plan_with
from fitune.session.results import result_data, text_of
from fitune.spec.recipe.recipe import parse_recipe
from plans import gpu, known, recipe_of


def test_a_change_is_read_like_a_recipe():
    recipe = recipe_of("gpt2", seq_len=512)
    for change in ("zero: 3, backend: fsdp", "zero=3, backend=fsdp", "{zero_stage: 3, backend: fsdp}"):
        changed = changed_recipe(recipe, change)
        assert (changed.zero, changed.backend, changed.seq_len) == (3, "fsdp", 512)


def test_an_equals_sign_in_a_value_stays_there():
    for change in ("chat_template: x=y.jinja, zero=3", "chat_template=x=y.jinja, zero: 3"):
        changed = changed_recipe(recipe_of("gpt2"), change)
        assert (changed.chat_template, changed.zero) == ("x=y.jinja", 3)


@pytest.mark.parametrize("change", ["", "zero", "zroe: 3", "zero: 9", "[1, 2]", "zero: 3, zero: 2"])
def test_a_change_that_is_none_is_refused(change):
    with pytest.raises(RecipeError):
        changed_recipe(recipe_of("gpt2"), change)


def test_why_not_zero_3_is_answered_in_bytes_and_seconds():
    recipe = recipe_of("llama-3.1-8b", gpu="a100-80gb", gpus=4, tuning="lora")
    text = text_of(plan_with(recipe, "zero: 3"))
    assert "with zero: 3" in text
    assert "a device at its peak" in text
    assert "sent in a step" in text


def test_a_change_that_does_not_fit_is_answered_with_its_sum():
    recipe = recipe_of("llama-3.1-8b", gpu="rtx-4090")
    answer = result_data(plan_with(recipe, "tuning: full, offload_optimizer: device"))["why"]
    assert answer["fits"] is False
    assert answer["pinned"]["estimate"]["peak_bytes"] > answer["taken"]["estimate"]["peak_bytes"]


def test_the_method_stays_unless_the_change_names_one():
    recipe = recipe_of("llama-3.1-8b", gpu="a100-80gb", gpus=4)
    answer = result_data(plan_with(recipe, "offload_optimizer: cpu"))["why"]
    assert answer["taken"]["plan"]["tuning"] == answer["pinned"]["plan"]["tuning"]


def test_the_longest_row_is_the_longest():
    settings = {"model": "llama-3.1-8b", "tuning": "lora", "precision": "bf16", "micro_batch_size": 1}
    pins = {"gradient_accumulation_steps": 1, "offload_parameters": "device", "offload_optimizer": "device"}
    recipe = parse_recipe({**settings, **pins})
    model, hardware = known("llama-3.1-8b"), gpu("rtx-4090")
    (found,) = largest(recipe, "seq_len", model=model, hardware=hardware)
    longest = recipe.model_copy(update={"seq_len": found.value})
    assert find_plan(longest, model=model, hardware=hardware).chosen.estimate.fits
    longer = recipe.model_copy(update={"seq_len": found.value + 64})
    with pytest.raises(NothingFits):
        find_plan(longer, model=model, hardware=hardware)


def test_fewer_trained_parameters_leave_room_for_more():
    recipe = recipe_of("llama-3.2-1b", seq_len=1024)
    found = largest(recipe, "micro_batch", model=known("llama-3.2-1b"), hardware=gpu("rtx-4090"))
    rows = {(type(item.method.tuning).__name__, item.method.precision.value): item.value for item in found}
    assert rows["Full", "bf16-master"] < rows["Lora", "bf16-master"]


def test_the_largest_model_is_named():
    recipe = recipe_of("llama-3.2-1b", gpu="rtx-4090", tuning="qlora", seq_len=1024)
    answer = result_data(largest_for(recipe, "model"))
    assert answer["methods"][0]["value"] in ("01-ai/Yi-34B", "Qwen/Qwen2.5-32B")


def test_with_parameters_on_the_host_the_longest_row_is_found():
    settings = {"model": "llama-3.1-8b", "offload_parameters": "cpu", "seq_len": 512}
    found = largest(parse_recipe(settings), "seq_len", model=known("llama-3.1-8b"), hardware=gpu("rtx-4090"))
    values = {type(item.method.tuning).__name__: item.value for item in found}
    assert values["Lora"]


def test_why_with_what_was_taken_anyway_is_the_same_plan():
    recipe = recipe_of("llama-3.1-8b", gpu="rtx-4090")
    assert "the same plan" in text_of(plan_with(recipe, "attn_implementation: flash"))


def test_an_unknown_quantity_is_refused():
    with pytest.raises(RecipeError, match="--largest speed is not known"):
        largest_for(recipe_of("llama-3.2-1b", gpu="t4"), "speed")


def test_a_side_that_cannot_be_trained_yet_is_marked():
    recipe = recipe_of("qwen3-8b", gpu="rtx-3090", gpus=2, tuning="lora")
    lines = text_of(plan_with(recipe, "zero: 3, backend: fsdp, offload_activations: device")).splitlines()
    assert lines[0] == "taken (only planned: fitune plan says what is trained instead)"
    assert "with zero: 3, backend: fsdp, offload_activations: device" in lines
