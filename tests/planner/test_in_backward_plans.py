"""``optimizer_in_backward``: only where it is asked for, with the same mathematics."""

from dataclasses import replace

import pytest

from fitune.errors import NothingFits
from fitune.estimate.predict import predict
from fitune.planner.candidates import Request
from fitune.planner.methods import methods
from fitune.values.plan import AdamW8bit, ClipByNorm, ClipByValue, Full, InBackward
from fitune.values.predictions import Phase
from plans import gpu, known, lines_of, plan_of, recipe_of, report_of

LLAMA = "llama-3.1-8b"
ONE_ROW = "micro_batch_size: 1, gradient_accumulation_steps: 1"
EIGHT_BIT = f"tuning: full, optimizer_in_backward: true, optimizer: adamw-8bit, {ONE_ROW}"
NEVER_CLIPPED = Full(update=InBackward(clip=ClipByNorm(max_norm=0)))


def method_tunings(settings):
    request = Request(recipe=recipe_of(LLAMA, settings), model=known(LLAMA), hardware=gpu("h100"))
    return {method.tuning for method in methods(request)}


def hint_of(card, settings):
    with pytest.raises(NothingFits) as caught:
        report_of(LLAMA, card, settings)
    return str(caught.value.hint)


def test_it_is_clipped_as_the_recipe_says_and_takes_one_micro_batch():
    """By norm as everywhere when nothing is said: the same steps come out."""
    settings = "tuning: full, optimizer_in_backward: true, optimizer: adamw-8bit, global_batch_size: 4"
    plan = plan_of(LLAMA, "h100", settings)
    assert plan.tuning == Full(update=InBackward(clip=ClipByNorm(max_norm=1.0)))
    assert (plan.batch.micro_batch_size, plan.batch.accumulation) == (4, 1)
    never = plan_of(LLAMA, "h100", EIGHT_BIT, max_grad_norm=0)
    assert never.tuning == NEVER_CLIPPED
    assert not never.goes_back_twice
    by_value = plan_of(LLAMA, "h100", EIGHT_BIT, max_grad_value=0.5)
    assert by_value.tuning == Full(update=InBackward(clip=ClipByValue(value=0.5)))


def test_the_second_backward_is_told_and_counted():
    report = report_of(LLAMA, "h100", EIGHT_BIT)
    [line] = lines_of(report, "optimizer in backward")
    assert "clipped at 1, fitune's default" in line
    assert "max_grad_norm: 0" in line
    plan = report.chosen.plan
    once, twice = (predict(each).time.phases for each in (replace(plan, tuning=NEVER_CLIPPED), plan))
    assert twice[Phase.FORWARD] == once[Phase.FORWARD]
    assert 1.5 < twice[Phase.BACKWARD] / once[Phase.BACKWARD] < 2


def test_an_open_tuning_becomes_full():
    """Adapters have next to no gradients to spare."""
    assert {type(tuning) for tuning in method_tunings("optimizer_in_backward: true")} == {Full}
    report = report_of(LLAMA, "h200", f"optimizer_in_backward: true, precision: bf16, {ONE_ROW}")
    assert lines_of(report, "tuning: full, because of optimizer_in_backward")


def test_it_is_never_chosen_and_is_proposed_where_it_helps():
    """8-bit AdamW in bf16: 8B takes 45 GiB with its gradients, and 33 without."""
    settings = "tuning: full, precision: bf16, optimizer: adamw-8bit"
    assert method_tunings(settings) == {Full()}
    hint = hint_of("a100-40gb", settings)
    assert hint.startswith("optimizer_in_backward: true with micro_batch_size: 1")
    assert plan_of(LLAMA, "a100-40gb", EIGHT_BIT, precision="bf16").optimizer == AdamW8bit()


def test_adapters_are_proposed_without_what_they_refuse():
    """``tuning: lora`` alone would be refused beside these settings."""
    settings = "tuning: full, optimizer_in_backward: true, max_grad_value: 1.0, export: full"
    words = "tuning: lora without optimizer_in_backward and max_grad_value and export: full"
    assert words in hint_of("rtx-4090", f"{settings}, {ONE_ROW}")
