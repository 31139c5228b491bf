"""Bytes that torch's cache keeps for FSDP's streams beside what compute can use."""

from dataclasses import replace

from fitune.estimate.overhead import stream_cache_bytes
from fitune.estimate.predict import predict, predict_memory
from fitune.planner.reasons.explain import memory_sum
from fitune.spec.plan import Zero
from fitune.spec.predictions import Phase
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
    assert stream_cache_bytes(phases, gradients=20) == 70 + 20 + 30 + 5 - 90


def test_only_sharding_by_fsdp_on_gpus_has_other_streams():
    plan = plan_for(
        known("llama-3.1-8b"), hardware=gpu("a100-80gb", gpus=8), precision="bf16-master", recompute=32
    )
    sharded = replace(plan, sharding=Zero(stage=3, backend="fsdp"))
    assert predict_memory(replace(plan, hardware=gpu("a100-80gb"))).reclaimable == 0
    memory = predict_memory(sharded)
    assert memory.reclaimable > 0
    assert memory.reserved_bytes == memory.peak_bytes + memory.reclaimable


def test_a_plan_that_only_its_cache_would_not_fit_says_so():
    plan = plan_for(
        known("llama-3.1-8b"), hardware=gpu("a100-80gb", gpus=8), precision="bf16-master", recompute=32
    )
    estimate = predict(replace(plan, sharding=Zero(stage=3, backend="fsdp")))
    tight = replace(estimate, usable_bytes=estimate.peak_bytes + estimate.memory.reclaimable // 2)
    assert tight.fits
    assert "fits, with allocator retries" in memory_sum(tight)
    assert "retries" not in memory_sum(replace(estimate, usable_bytes=estimate.memory.reserved_bytes))
