"""Bytes that torch's cache keeps for FSDP's streams beside what compute can use."""

from dataclasses import replace

from fitune.estimate.overhead import allocator_slack_bytes, stream_cache_bytes
from fitune.estimate.predict import predict, predict_memory
from fitune.planner.explain import memory_sum
from fitune.values.plan import Nf4, Zero
from fitune.values.predictions import Phase
from plans import gpu, known, plan_for


def test_every_stream_keeps_its_own_most():
    """Compute's most is 70 in the loss, where 10 are gathered; backward gathers 30 and sums 5, 20 of gradients stay."""
    phases = {
        Phase.LOSS: {"weights": 20, "loss": 50, "gathered weights": 10},
        Phase.BACKWARD: {
            "weights": 20,
            "activations": 15,
            "gathered weights": 30,
            "reduce buffers": 5,
            "gradients": 20,
        },
    }
    assert stream_cache_bytes(phases, gradients=20, gathered=0) == 70 + 20 + 30 + 5 - 90
    assert stream_cache_bytes(phases, gradients=20, gathered=40) == 70 + 20 + 40 + 5 - 90


def test_frozen_weights_over_two_cards_keep_room_for_every_stream_in_the_slack():
    """Before the first block embedding and head are there as copy and as buffer, with two of a block. At backward's
    worst their buffer is gone and its stream still holds it; another holds the sums of all gradients."""
    one = plan_for(
        known("llama-2-70b"), hardware=gpu("rtx-4090", gpus=2), tuning="lora", precision="bf16", recompute=80,
        rows=1, seq_len=512,
    )  # fmt: skip
    plan = replace(one, tuning=replace(one.tuning, base=Nf4()), sharding=Zero(stage=3, backend="fsdp"))
    memory = predict_memory(plan)
    peak = memory.phases[Phase.BACKWARD]
    assert memory.peak_phase is Phase.BACKWARD
    moving = sum(peak.values()) - sum(memory.phases[Phase.IDLE].values())
    usual = allocator_slack_bytes(plan.hardware, moving_bytes=moving, recomputes=True)
    root, sums = (2 * 32_000 + 1) * 8192 * 2, memory.phases[Phase.UPDATE]["gradients"] - peak["gradients"]
    assert memory.outside["allocator slack"] == usual + root + sums
    assert memory.reclaimable == 0


def test_longer_rows_never_take_less_room_from_the_streams():
    """From 3,584 tokens on a block's own temporaries are forward's worst, and no longer three gathered blocks."""
    slacks = []
    for seq_len in (3520, 3584):
        one = plan_for(
            known("llama-2-70b"), hardware=gpu("v100-32gb", gpus=8), tuning="lora", precision="fp16", recompute=79,
            rows=1, seq_len=seq_len,
        )  # fmt: skip
        memory = predict_memory(replace(one, sharding=Zero(stage=3, backend="fsdp")))
        slacks.append(memory.outside["allocator slack"])
    assert slacks == sorted(slacks)


def test_a_plan_that_only_the_cache_of_other_streams_would_not_fit_says_so():
    """Only sharding by FSDP has other streams."""
    plan = plan_for(
        known("llama-3.1-8b"), hardware=gpu("a100-80gb", gpus=8), precision="bf16-master", recompute=32
    )
    assert predict_memory(replace(plan, hardware=gpu("a100-80gb"))).reclaimable == 0
    estimate = predict(replace(plan, sharding=Zero(stage=3, backend="fsdp")))
    memory = estimate.memory
    assert memory.reserved_bytes == memory.peak_bytes + memory.reclaimable > memory.peak_bytes
    tight = replace(estimate, usable_bytes=memory.peak_bytes + memory.reclaimable // 2)
    assert tight.fits
    assert "fits, with allocator retries" in memory_sum(tight)
    assert "retries" not in memory_sum(replace(estimate, usable_bytes=memory.reserved_bytes))
