"""What another choice would cost, and how far one can go."""

import pytest

from fitune.errors import NothingFits, RecipeError
from fitune.planner.first_screen import changed_recipe
from fitune.planner.study import largest
from fitune.session.alternatives import largest_for, plan_with
from fitune.units import format_bytes
from plans import gpu, known, recipe_of, report_of


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ("zero: 3, backend: fsdp", {"zero": 3, "backend": "fsdp"}),
        ("zero=3, backend=fsdp", {"zero": 3, "backend": "fsdp"}),
        ("{zero_stage: 3, backend: fsdp}", {"zero": 3, "backend": "fsdp"}),
        ("chat_template: x=y.jinja, zero=3", {"chat_template": "x=y.jinja", "zero": 3}),
        ("chat_template=x=y.jinja, zero: 3", {"chat_template": "x=y.jinja", "zero": 3}),
    ],
)
def test_a_change_is_read_like_a_recipe(change, changed):
    assert changed_recipe(recipe_of("gpt2", "seq_len: 512"), change) == recipe_of(
        "gpt2", seq_len=512, **changed
    )


@pytest.mark.parametrize("change", ["", "zero", "zroe: 3", "[1, 2]"])
def test_a_change_that_is_none_is_refused(change):
    with pytest.raises(RecipeError):
        changed_recipe(recipe_of("gpt2"), change)


def why(model, settings, change):
    """The lines of the answer to ``--why CHANGE``, and its data."""
    text, data = plan_with(recipe_of(model, settings), change)
    return text.splitlines(), data["why"]


def test_the_method_stays_unless_the_change_names_one_and_the_difference_is_told():
    lines, answer = why("llama-3.2-1b", "gpu: a100-80gb, gpus: 4", "zero: 3, offload_optimizer: cpu")
    assert answer["taken"]["plan"]["tuning"] == answer["pinned"]["plan"]["tuning"]
    for name, key in (("a device at its peak", "peak_bytes"), ("sent in a step", "communication_bytes")):
        [row] = (line for line in lines if line.strip().startswith(name))
        taken, pinned = (answer[side]["estimate"][key] for side in ("taken", "pinned"))
        change = f"{'+' if pinned >= taken else '−'}{format_bytes(abs(pinned - taken))}"
        assert " ".join(row.split()) == f"{name} {format_bytes(taken)} {format_bytes(pinned)} {change}"


def test_a_change_that_does_not_fit_is_answered_with_its_sum():
    _, answer = why("llama-3.1-8b", "gpu: rtx-4090", "tuning: full, offload_optimizer: device")
    assert answer["fits"] is False
    assert answer["pinned"]["estimate"]["peak_bytes"] > answer["taken"]["estimate"]["peak_bytes"]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ("attn_implementation: flash", "the same plan: that is what was taken"),
        ("loss_chunk_tokens: 1024", "fits and is as fast within 3 %; of such plans the simplest is taken"),
        ("kernels: liger", "fits and takes 0.75 × the time per token"),
        ("global_batch_size: 64", "fits and takes 1.00 × the time per token"),
    ],
)
def test_the_rule_of_choice_is_the_reason_only_where_the_search_had_the_choice(change, verdict):
    """Liger's kernels, another precision and other batches are never chosen, so no gain of theirs is too small."""
    lines, _ = why("llama-3.2-1b", "gpu: rtx-4090, tuning: lora", change)
    assert lines[-1].strip() == verdict


def test_a_side_that_cannot_be_trained_yet_is_marked():
    """What is taken is what training takes; a change that leaves it no plan is shown as it is planned."""
    change = "zero: 0, offload_activations: cpu"
    lines, _ = why("qwen3-8b", "gpu: rtx-3090, gpus: 2, tuning: lora", change)
    assert lines[0] == "taken"
    assert f"with {change} (only planned: fitune plan says what is trained instead)" in lines


def largest_on_4090(model, quantity, settings):
    """The largest value by tuning and precision."""
    found = largest(recipe_of(model, settings), quantity, model=known(model), hardware=gpu("rtx-4090"))
    return {(tuning, precision): value for (tuning, _, precision), value in found.items()}


@pytest.mark.parametrize("parameters", ["device", "cpu"])
def test_the_longest_row_is_the_longest(parameters):
    """Of one row at a time, where the recipe leaves that open."""
    settings = (
        f"tuning: lora, precision: bf16-master, offload_optimizer: device, offload_parameters: {parameters}"
    )
    [longest] = largest_on_4090("llama-3.1-8b", "seq_len", settings).values()
    settings += ", micro_batch_size: 1, gradient_accumulation_steps: 1"
    assert report_of("llama-3.1-8b", "rtx-4090", settings, seq_len=longest).chosen.estimate.fits
    with pytest.raises(NothingFits):
        report_of("llama-3.1-8b", "rtx-4090", settings, seq_len=longest + 64)


def test_fewer_trained_parameters_leave_room_for_more():
    rows = largest_on_4090("llama-3.2-1b", "micro_batch", "seq_len: 1024")
    assert rows["full", "bf16-master"] < rows["lora", "bf16-master"]


def test_the_largest_model_is_named():
    recipe = recipe_of("llama-3.2-1b", "gpu: rtx-4090, tuning: qlora, seq_len: 1024")
    _, answer = largest_for(recipe, "model")
    assert answer["methods"][0]["value"] in ("01-ai/Yi-34B", "Qwen/Qwen2.5-32B")


def test_an_unknown_quantity_is_refused():
    with pytest.raises(RecipeError, match="--largest speed is not known"):
        largest_for(recipe_of("llama-3.2-1b", gpu="t4"), "speed")
