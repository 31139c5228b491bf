"""The plan after an out-of-memory error: smaller micro-batches, the same global batch, never more than what failed."""

from dataclasses import replace

import pytest

from fitune.errors import Shortage
from fitune.estimate.predict import predict
from fitune.planner.retry import next_to_try, smaller_batches, smaller_plan, why_no_smaller
from fitune.planner.search import find_plan
from fitune.units import GIB
from fitune.values.plan import ChunkedLoss, Recompute
from fitune.values.predictions import Phase
from plans import gpu, known, recipe_of


def asked(settings="", rows=8, steps=2, card="a100-80gb"):
    """A recipe and the plan that failed."""
    batch = f"micro_batch_size: {rows}, gradient_accumulation_steps: {steps}"
    recipe = recipe_of("llama-3.1-8b", f"gpu: {card}, {batch}, {settings or 'tuning: lora'}")
    hardware = gpu(card, host_memory_bytes=256 * GIB)
    return recipe, find_plan(recipe, model=known("llama-3.1-8b"), hardware=hardware).chosen.plan


def shortage(doing="backward", *, in_use=0, asked=0, capacity=0):
    return Shortage(
        doing=doing, step=3, kind="cuda allocated", in_use_bytes=in_use, asked_bytes=asked,
        capacity_bytes=capacity,
    )  # fmt: skip


def peak(plan):
    return predict(plan).memory.tensor_peak_bytes


@pytest.mark.parametrize(("rows", "halves"), [(8, [4, 2, 1]), (9, [3, 1]), (7, [1]), (6, [3, 1]), (1, [])])
def test_the_micro_batch_halves_and_the_accumulation_doubles(rows, halves):
    _, plan = asked(rows=rows)
    found = list(smaller_batches(plan))
    assert [batch.micro_batch_size for batch in found] == halves
    assert {batch.global_batch_size for batch in found} <= {plan.batch.global_batch_size}


@pytest.mark.parametrize(
    ("settings", "card"), [("", "a100-80gb"), ("tuning: full", "h200"), ("tuning: qlora", "rtx-4090")]
)
@pytest.mark.parametrize("doing", ["forward", "loss", "backward", "evaluating"])
def test_the_next_plan_takes_less_and_gives_up_nothing(settings, card, doing):
    recipe, failed = asked(settings, card=card)
    while (plan := smaller_plan(failed, recipe, shortage(doing))) is not None:
        assert peak(plan) < peak(failed)
        assert plan.recompute.blocks >= failed.recompute.blocks
        assert plan.batch.global_batch_size == failed.batch.global_batch_size
        assert replace(plan, batch=failed.batch, recompute=failed.recompute, loss=failed.loss) == failed
        failed = plan
    assert failed.batch.micro_batch_size < 8
    assert why_no_smaller(failed, shortage(doing))


def test_a_device_that_has_less_than_was_thought_makes_it_recompute_more():
    recipe, failed = asked()
    half = peak(failed) // 2
    plan = smaller_plan(failed, recipe, shortage(in_use=half - GIB, asked=2 * GIB, capacity=half))
    assert peak(plan) <= half < peak(smaller_plan(failed, recipe, shortage()))


def test_a_step_that_needed_more_than_was_thought_makes_the_rest_count_more():
    """A tenth more than predicted where it failed: the next plan has a tenth to spare."""
    recipe, failed = asked()
    backward = sum(predict(failed).memory.phases[Phase.BACKWARD].values())
    capacity = int(1.05 * backward)
    seen = shortage(in_use=int(1.1 * backward) - GIB, asked=GIB, capacity=capacity)
    assert 1.1 * peak(smaller_plan(failed, recipe, seen)) <= capacity


NO_ROOM = shortage(in_use=GIB, asked=GIB, capacity=2 * GIB)


def test_where_nothing_has_room_the_smallest_is_tried():
    recipe, failed = asked()
    plan = smaller_plan(failed, recipe, NO_ROOM)
    assert plan.batch.micro_batch_size == 1
    assert plan.recompute.blocks >= failed.model.num_layers - 1


def test_pins_stay():
    pins = "tuning: lora, gradient_checkpointing: 3, loss: chunked, loss_chunk_tokens: 1024"
    recipe, failed = asked(pins, card="h200")
    plan = smaller_plan(failed, recipe, NO_ROOM)
    assert (plan.recompute, plan.loss) == (Recompute(blocks=3), ChunkedLoss(chunk_tokens=1024))


def test_what_the_micro_batch_does_not_decide_is_not_tried_again():
    recipe, failed = asked("tuning: full", card="h200")
    lacking = shortage("update")
    assert smaller_plan(failed, recipe, lacking) is None
    assert why_no_smaller(failed, lacking) == "what update takes does not depend on the micro-batch"


@pytest.mark.parametrize(
    ("method", "left_out"),
    [
        ("tuning: lomo", ""),
        (
            "tuning: full, optimizer_in_backward: true, max_grad_value: 1.0",
            " without optimizer_in_backward and max_grad_value",
        ),
    ],
)
def test_what_updates_in_backward_adds_nothing_up(method, left_out):
    recipe, failed = asked(f"{method}, gradient_checkpointing: 4, loss: plain", steps=1, card="h200")
    assert smaller_plan(failed, recipe, shortage()) is None
    assert "cannot be added up" in why_no_smaller(failed, shortage())
    words = [*next_to_try(failed, recipe, shortage())]
    assert words[0].startswith("loss: chunked, loss_chunk_tokens: 256")
    assert any("gradient_checkpointing: true" in change for change in words)
    assert any("micro_batch_size: 4 (a smaller global batch" in change for change in words)
    assert any(change.endswith(f"tuning: lora{left_out}") for change in words)


def test_what_is_left_to_try_takes_less_and_can_be_trained():
    recipe, failed = asked("tuning: lora, gradient_checkpointing: 0, loss: plain", rows=1)
    changes = next_to_try(failed, recipe, shortage())
    assert all(peak_bytes < peak(failed) for peak_bytes in changes.values())
    for words in ("offload_activations: cpu", "tuning: qlora"):
        assert any(words in change for change in changes)
