"""What is remembered of a plan by some of its fields does not depend on the others."""

from dataclasses import replace

import pytest

from fitune.estimate import buffers, division, parameters, transfers
from fitune.values import counts, deepspeed
from fitune.values.plan import (
    Batch,
    ClipByNorm,
    Ddp,
    Full,
    Lomo,
    Lora,
    Nf4,
    Offload,
    Precision,
    Single,
    Zero,
)
from fitune.values.remembered import remembered
from plans import gpu, known, plan_for, small_llama

OF_VALUES = {
    "base_tensors", "adapters_of", "kind_tensors", "count_parameters", "lora_parameters", "adapted_blocks",
    "_linear_flops_per_token",
}  # fmt: skip
"""They are asked about whole values, not about fields of a plan."""
REMEMBERED = [
    function
    for room in (counts, deepspeed, division, parameters, buffers, transfers)
    for name, function in vars(room).items()
    if callable(function) and hasattr(function, "__wrapped__") and function.__module__ == room.__name__
    if name not in OF_VALUES
]


def variants():
    """Plans that share all objects but those of one field."""
    model, large = small_llama(), known("meta-llama/Llama-3.1-8B")
    eight = gpu("a100-80gb", gpus=8)
    lora = plan_for(model, tuning="lora", precision="bf16", hardware=eight)
    assert isinstance(lora.tuning, Lora)
    tunings = [
        lora.tuning, replace(lora.tuning, rank=3), replace(lora.tuning, base=Nf4(double_quant=True)), Full(),
        replace(lora.tuning, modules_to_save=("embed_tokens",)),
    ]  # fmt: skip
    shardings = [
        Single(), Ddp(), *(Zero(stage=stage, backend="fsdp") for stage in (1, 2, 3)),
        Zero(stage=3, backend="fsdp", hybrid=True), Zero(stage=2, backend="deepspeed"),
        Zero(stage=3, backend="deepspeed"),
    ]  # fmt: skip
    for tuning in tunings:
        for sharding in shardings:
            base = replace(lora, tuning=tuning, sharding=sharding)
            yield base
            yield replace(base, offload=Offload(parameters="cpu", optimizer="cpu"))
            yield replace(base, precision=Precision.FP32)
            yield replace(base, precision=Precision.BF16_MASTER)
            yield replace(base, hardware=gpu("a100-80gb", gpus=2))
            yield replace(base, hardware=replace(eight, nodes=2, internode_bandwidth=1e10))
            yield replace(base, batch=Batch(micro_batch_size=2, accumulation=3, seq_len=64, packing=False))
            yield replace(base, model=large)
    lomo = replace(lora, tuning=Lomo(adaptive=False, clip=ClipByNorm(max_norm=1.0)), precision=Precision.FP16)
    yield lomo
    yield replace(lomo, sharding=Ddp())
    yield replace(lomo, sharding=Ddp(), precision=Precision.BF16)


@pytest.mark.parametrize("function", REMEMBERED, ids=lambda function: function.__name__)
def test_a_remembered_answer_is_the_answer(function):
    plans = list(variants())
    for plan in [*plans, *reversed(plans)]:
        assert function(plan) == function.__wrapped__(plan), plan


def test_an_object_keeps_its_identity_as_long_as_its_answer():
    asked = []

    @remembered
    def length(value):
        asked.append(value)
        return len(value)

    for size in range(100):  # each list could be where the one before was
        assert length([0] * size) == size
    same = [1, 2]
    assert length(same) == length(same) == 2
    assert len(asked) == 101
