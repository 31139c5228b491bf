"""A plan that breaks a rule is refused before anything is loaded, and the refusal names every reason."""

from dataclasses import replace

import pytest

from fitune.errors import RecipeError
from fitune.train.prepare import prepare
from fitune.values.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Lomo,
    Lora,
    Nf4,
    Offload,
    Precision,
    Sgd,
    Zero,
)
from fitune.values.rules import require_rules
from plans import plan_for, small_llama


@pytest.fixture(scope="module")
def any_plan():
    return plan_for(small_llama())


BY_VALUE = Lomo(adaptive=False, clip=ClipByValue(value=1.0))
QLORA = Lora(rank=2, alpha=4, dropout=0.0, targets=("q_proj",), base=Nf4())
ON_NVME = Offload(parameters="nvme", optimizer="nvme", nvme_path="n")
AHEAD = (("stage3_prefetch_bucket_size", 1 << 20),)
BY_NORM = Lomo(adaptive=True, clip=ClipByNorm(max_norm=1.0))


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"tuning": BY_VALUE}, "LOMO is an optimizer itself"),
        ({"tuning": BY_NORM, "precision": Precision.BF16_MASTER}, "AdaLomo .* no fp32 masters"),
        ({"sharding": Zero(stage=3, backend="deepspeed"), "tuning": QLORA}, "packed weights are divided by FSDP2"),
        (
            {"sharding": Zero(stage=3, backend="deepspeed", settings=AHEAD), "offload": ON_NVME},
            "until no buffer is left",
        ),
        ({"sharding": Zero(stage=3, backend="fsdp")}, "are for several devices, and there is 1"),
        ({"tuning": BY_NORM, "optimizer": Sgd(), "kernels": "liger"}, "second backward"),
        ({"tuning": BY_VALUE, "optimizer": Sgd(), "compile_blocks": True}, "all of its gradients at once"),
        ({"tuning": BY_VALUE, "optimizer": Sgd(), "offload": Offload(parameters="cpu")}, "LOMO steps weights on the"),
        ({"tuning": BY_NORM, "optimizer": Sgd(), "offload": Offload(activations="cpu")}, "two backward passes"),
        ({"offload": Offload(activations="cpu"), "compile_blocks": True}, "a compiled block expects"),
        ({"offload": Offload(optimizer="cpu"), "optimizer": AdamW8bit()}, "8-bit AdamW steps on the device"),
        ({"offload": Offload(parameters="cpu")}, "updated on the host, so the optimizer must be there"),
        ({"offload": Offload(parameters="nvme", optimizer="nvme", nvme_path="n")}, "needs DeepSpeed at stage 3"),
        ({"offload": Offload(optimizer="nvme", nvme_path="n")}, "needs DeepSpeed at stage 3"),
        ({"offload": Offload(activations="nvme", nvme_path="n")}, "to the host, not to NVMe"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_refused_by_it(any_plan, choice, named):
    plan = replace(any_plan, model_path="/nowhere", **choice)
    with pytest.raises(RecipeError, match=named) as caught:
        prepare(plan)
    assert caught.value.hint


def test_all_reasons_are_named_at_once(any_plan):
    plan = replace(any_plan, sharding=Ddp(), offload=Offload(optimizer="cpu"))
    with pytest.raises(RecipeError, match="there is 1; DDP .* keeps weights"):
        require_rules(plan, "train")
