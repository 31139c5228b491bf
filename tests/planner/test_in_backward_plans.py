"""``optimizer_in_backward``: only where it is asked for, with the same mathematics, and refused with its reason."""

from dataclasses import replace

import pytest

from fitune.errors import NothingFits, RecipeError
from fitune.estimate.predict import predict
from fitune.planner.candidates import Request
from fitune.planner.methods import methods
from fitune.planner.search import find_plan
from fitune.spec.plan import AdamW8bit, ClipByNorm, ClipByValue, Full, InBackward, Plan, Precision
from fitune.spec.predictions import Phase
from fitune.spec.recipe.recipe import canonical_keys, parse_recipe
from fitune.spec.serial import from_data, from_json, to_data, to_json
from plans import gpu, known

ONE_ROW = {"micro_batch_size": 1, "gradient_accumulation_steps": 1}


def recipe_of(**settings):
    return parse_recipe(canonical_keys({"model": "llama-3.1-8b", **settings}, where="test"))


def report_of(card="h100", *, gpus=1, **settings):
    wanted = {"tuning": "full", "optimizer_in_backward": True, **settings}
    return find_plan(recipe_of(**wanted), model=known("llama-3.1-8b"), hardware=gpu(card, gpus=gpus))


def plan_of(card="h100", **settings):
    return report_of(card, **settings).chosen.plan


def test_it_is_clipped_as_the_recipe_says():
    """By norm as everywhere when nothing is said: the same steps come out."""
    eight_bit = {"optimizer": "adamw-8bit", **ONE_ROW}
    assert plan_of(**eight_bit).tuning == Full(update=InBackward(clip=ClipByNorm(max_norm=1.0)))
    never = plan_of(**eight_bit, max_grad_norm=0)
    assert never.tuning == Full(update=InBackward(clip=ClipByNorm(max_norm=0)))
    assert not never.goes_back_twice
    by_value = plan_of(**eight_bit, max_grad_value=0.5)
    assert by_value.tuning == Full(update=InBackward(clip=ClipByValue(value=0.5)))


def test_torchtunes_name_is_known():
    assert recipe_of(optimizer_in_bwd=True).optimizer_in_backward


def test_the_second_backward_is_told_and_counted():
    report = report_of(optimizer="adamw-8bit", **ONE_ROW)
    line = next(line for line in report.decisions if line.startswith("optimizer in backward"))
    assert "clipped at 1, fitune's default" in line
    assert "max_grad_norm: 0" in line
    plan = report.chosen.plan
    once = predict(replace(plan, tuning=Full(update=InBackward(clip=ClipByNorm(max_norm=0)))))
    twice = predict(plan)
    assert twice.time.phases[Phase.FORWARD] == once.time.phases[Phase.FORWARD]
    assert 1.5 < twice.time.phases[Phase.BACKWARD] / once.time.phases[Phase.BACKWARD] < 2


def test_the_micro_batch_is_the_whole_batch():
    plan = plan_of(optimizer="adamw-8bit", global_batch_size=4)
    assert (plan.batch.micro_batch_size, plan.batch.accumulation) == (4, 1)


def test_an_open_tuning_becomes_full():
    """Adapters have next to no gradients to spare."""
    found = methods(
        Request(
            recipe=recipe_of(optimizer_in_backward=True), model=known("llama-3.1-8b"), hardware=gpu("h100")
        )
    )
    assert {type(method.tuning) for method in found} == {Full}
    report = report_of("h200", tuning=None, precision="bf16", **ONE_ROW)
    assert any(line.startswith("tuning: full, because of optimizer_in_backward") for line in report.decisions)


def test_it_is_never_chosen_and_is_proposed_where_it_helps():
    """8-bit AdamW in bf16: 8B takes 45 GiB with its gradients, and 33 without."""
    settings = {"tuning": "full", "precision": "bf16", "optimizer": "adamw-8bit"}
    request = Request(recipe=recipe_of(**settings), model=known("llama-3.1-8b"), hardware=gpu("h100"))
    for method in methods(request):
        assert method.tuning == Full()
    with pytest.raises(NothingFits) as caught:
        report_of("a100-40gb", **settings, optimizer_in_backward=False)
    hint = str(caught.value.hint)
    assert hint.startswith("optimizer_in_backward: true with micro_batch_size: 1")
    assert plan_of("a100-40gb", **settings, **ONE_ROW).optimizer == AdamW8bit()


def test_adapters_are_proposed_without_what_they_refuse():
    """``tuning: lora`` alone would be refused beside these settings."""
    with pytest.raises(NothingFits) as caught:
        report_of("rtx-4090", tuning="full", max_grad_value=1.0, export="full", **ONE_ROW)
    words = "tuning: lora without optimizer_in_backward and max_grad_value and export: full"
    assert words in str(caught.value.hint)


@pytest.mark.parametrize(
    ("gpus", "settings", "message"),
    [
        (1, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4"),
        (1, {"global_batch_size": 8, "micro_batch_size": 2}, "global_batch_size 8 is 4 × micro_batch_size 2"),
        (1, {"tuning": "lora"}, "adapters are hundreds of times fewer"),
        (1, {"tuning": None, "quantization": "nf4"}, "next to nothing to gain"),
        (2, {"backend": "deepspeed"}, "which FSDP2 does in backward at stages 2 and 3"),
        (2, {"zero": 1}, "which FSDP2 does in backward at stages 2 and 3"),
        (2, {"optimizer": "adamw-8bit"}, "8-bit AdamW with optimizer_in_backward on several devices"),
        (1, {"offload_optimizer": "cpu"}, "offloaded ones are stepped on the host .* offload_optimizer: cpu"),
        (1, {"offload_parameters": "cpu"}, "offload_parameters: cpu"),
    ],
)
def test_what_it_cannot_do_is_refused(gpus, settings, message):
    with pytest.raises(RecipeError, match=message) as caught:
        report_of(gpus=gpus, **settings)
    assert caught.value.hint


def test_a_plan_is_read_as_it_was_written():
    plan = plan_of(optimizer="adamw-8bit", **ONE_ROW)
    assert from_json(Plan, to_json(plan)) == plan


def test_a_plan_from_before_there_was_a_choice_still_reads():
    plan = replace(plan_of(optimizer="adamw-8bit", **ONE_ROW), tuning=Full(), precision=Precision.BF16)
    data = to_data(plan)
    del data["tuning"]["update"]
    assert from_data(Plan, data) == plan
