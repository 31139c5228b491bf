"""What cannot be rehearsed is known before torch is loaded, and said with what can."""

from dataclasses import replace

import pytest

from fitune.errors import RecipeError
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.values.plan import (
    AdamW,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Full,
    InBackward,
    Lomo,
    Precision,
    Sgd,
    Zero,
)
from fitune.values.rules import keeps_rules, require_rules
from plans import gpu, known


def plan_on_ranks(sharding, **changes):
    recipe = parse_recipe({"model": "qwen3-0.6b", "tuning": "lora", "seq_len": 512})
    plan = find_plan(recipe, model=known("qwen3-0.6b"), hardware=gpu("a100-40gb", gpus=4)).chosen.plan
    return replace(plan, sharding=sharding, **changes)


@pytest.mark.parametrize(
    "tuning",
    [Lomo(adaptive=True, clip=ClipByValue(value=1.0)), Full(update=InBackward(clip=ClipByNorm(max_norm=0)))],
)
def test_updates_in_backward_can_be_rehearsed_where_the_weights_are_divided(tuning):
    optimizer = Sgd() if isinstance(tuning, Lomo) else AdamW()
    plan = plan_on_ranks(
        Zero(stage=3, backend="fsdp"), tuning=tuning, optimizer=optimizer, precision=Precision.BF16
    )
    assert keeps_rules(replace(plan, batch=replace(plan.batch, accumulation=1)), "rehearse")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fsdp_can_be_rehearsed(stage):
    assert keeps_rules(plan_on_ranks(Zero(stage=stage, backend="fsdp")), "rehearse")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_on_ranks(Ddp()), "DDP fills its buckets"),
        (plan_on_ranks(Zero(stage=3, backend="deepspeed")), "DeepSpeed does not run"),
    ],
    ids=["ddp", "deepspeed"],
)
def test_what_cannot_is_refused(plan, words):
    with pytest.raises(RecipeError, match=words) as caught:
        require_rules(plan, "rehearse")
    assert "rehearsed" in caught.value.hint


def test_the_plan_to_rehearse_is_one_that_can_be():
    recipe = parse_recipe({"model": "llama-2-70b", "seq_len": 1024})
    report = find_plan(
        recipe, model=known("llama-2-70b"), hardware=gpu("v100-32gb", gpus=8), purposes=("plan", "rehearse")
    )
    assert report.chosen.plan.sharding == Zero(stage=3, backend="fsdp")


def test_a_torch_without_fake_collectives_is_named():
    """torch 2.9 has no allreduce for fake tensors; what another operation lacks is no matter of ranks."""
    import torch
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    from fitune.rehearse.recorder import fake_ranks

    plan = plan_on_ranks(Zero(stage=3, backend="fsdp"))
    with pytest.raises(RecipeError, match="no c10d.allreduce_.default for fake tensors"), fake_ranks(plan):
        raise UnsupportedOperatorException(torch.ops.c10d.allreduce_.default)
    with pytest.raises(UnsupportedOperatorException), fake_ranks(plan):
        raise UnsupportedOperatorException(torch.ops.aten.nonzero.default)
