"""FLOPs by hand and the shape of the roofline."""

import pytest

from estimate.tiny_plans import gpu, known, plan_for, small_llama
from fitune.estimate.predict import predict
from fitune.estimate.time import MATMUL_EFFICIENCY, model_flops_per_token, predict_step_time
from fitune.spec.parameters import count_parameters
from fitune.spec.reports import Phase


def test_full_fine_tuning_takes_six_flops_per_weight_and_token():
    """6 × (matrices of the blocks + head), + 6·L·q·(T + 1) for causal attention."""
    model = known("llama-3.1-8b")
    plan = plan_for(model, precision="bf16", rows=1, seq_len=2048)
    counts = count_parameters(model)
    supervised = 2047 / 2048
    expected = 6 * (counts.attention + counts.mlp) + 6 * counts.head * supervised + 6 * 32 * 4096 * 2049
    assert model_flops_per_token(plan) == pytest.approx(expected, rel=1e-9)


def test_lora_takes_four_flops_per_frozen_weight_and_six_per_adapter():
    model = known("llama-3.1-8b")
    counts = count_parameters(model)
    plan = plan_for(model, precision="bf16", rows=1, seq_len=2048, tuning="lora", rank=16)
    supervised = 2047 / 2048
    adapters = 41_943_040
    expected = (
        4 * (counts.attention + counts.mlp + counts.head * supervised) + 6 * adapters + 6 * 32 * 4096 * 2049
    )
    assert model_flops_per_token(plan) == pytest.approx(expected, rel=1e-9)


def test_phases_add_up_to_the_step_and_every_limit_is_named():
    time = predict(plan_for(known("llama-3.1-8b"), hardware=gpu("h100"), precision="bf16", seq_len=2048)).time
    assert set(time.phases) == {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.UPDATE}
    assert time.step_seconds == pytest.approx(sum(time.phases.values()))
    assert set(time.limits.values()) <= {"compute", "memory bandwidth", "launch"}
    assert time.limits[Phase.UPDATE] == "memory bandwidth"


def test_a_step_is_never_faster_than_its_products_at_the_assumed_efficiency():
    for tuning in ("full", "lora"):
        plan = plan_for(
            known("llama-3.1-8b"), hardware=gpu("a100-80gb"), precision="bf16", seq_len=2048, tuning=tuning
        )
        flops = model_flops_per_token(plan) * plan.batch.micro_batch_tokens
        attention = 6 * 32 * 4096 * 2049 * plan.batch.micro_batch_tokens
        bound = (flops - attention) / (312e12 * MATMUL_EFFICIENCY)
        assert bound < predict_step_time(plan).step_seconds < 2 * bound


def test_a_tiny_model_is_bound_by_launches():
    time = predict_step_time(plan_for(small_llama(), hardware=gpu("h100"), precision="bf16", rows=1))
    assert time.limits[Phase.FORWARD] == "launch"
