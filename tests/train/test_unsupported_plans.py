"""A plan that this version cannot run is refused before anything is loaded, and the refusal names every reason."""

from dataclasses import replace

import pytest

from estimate.tiny_plans import plan_for, small_llama
from fitune.errors import RecipeError
from fitune.spec.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Lomo,
    Offload,
    Plan,
    Precision,
    Sgd,
    Zero,
)
from fitune.train.prepare import prepare
from fitune.train.supported import require_supported


@pytest.fixture(scope="module")
def any_plan() -> Plan:
    return plan_for(small_llama())


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"tuning": Lomo(adaptive=False, clip=ClipByValue(value=1.0))}, "LOMO with another optimizer"),
        (
            {
                "tuning": Lomo(adaptive=True, clip=ClipByNorm(max_norm=1.0)),
                "precision": Precision.BF16_MASTER,
            },
            "AdaLomo with fp32 masters",
        ),
        ({"sharding": Ddp()}, "sharding DDP"),
        (
            {
                "tuning": Lomo(adaptive=False, clip=ClipByNorm(max_norm=1.0)),
                "optimizer": Sgd(),
                "kernels": "liger",
            },
            "Liger's kernels where backward runs twice",
        ),
        (
            {
                "tuning": Lomo(adaptive=False, clip=ClipByValue(value=1.0)),
                "optimizer": Sgd(),
                "compile_blocks": True,
            },
            "updating in backward with compiled blocks",
        ),
        (
            {"offload": Offload(activations="cpu"), "compile_blocks": True},
            "offload together with compiled blocks",
        ),
        ({"sharding": Zero(stage=3, backend="fsdp")}, r"sharding ZeRO-3 \(fsdp\)"),
        ({"offload": Offload(optimizer="cpu"), "optimizer": AdamW8bit()}, "AdamW8bit on the host"),
        ({"offload": Offload(parameters="cpu")}, "offload of trained weights without their optimizer"),
        ({"offload": Offload(parameters="nvme", optimizer="nvme")}, "offload of parameters to nvme"),
        ({"offload": Offload(optimizer="nvme")}, "offload of optimizer to nvme"),
        ({"offload": Offload(activations="nvme")}, "offload of activations to nvme"),
    ],
)
def test_what_is_not_in_this_version_is_named(any_plan, choice, named):
    plan = replace(any_plan, model_path="/nowhere", **choice)
    with pytest.raises(RecipeError, match=f"cannot train yet: {named}"):
        prepare(plan)


def test_all_reasons_are_named_at_once(any_plan):
    plan = replace(any_plan, sharding=Ddp(), offload=Offload(optimizer="cpu"))
    with pytest.raises(RecipeError, match="sharding DDP, offload"):
        require_supported(plan)


def test_what_is_in_this_version_passes(any_plan):
    require_supported(any_plan)
