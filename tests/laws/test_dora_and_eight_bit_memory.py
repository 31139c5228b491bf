"""DoRA and 8-bit AdamW: predicted, rehearsed and measured on the CPU, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.values.plan import AdamW8bit, Dense, Nf4
from fitune.values.predictions import Phase
from laws.test_memory_prediction import bench
from laws.test_rehearsal_estimate import hidden_states_off
from laws.test_rehearsal_real_step import check_all
from plans import gpu, plan_for
from rehearse.tiny_configs import tiny

pytest.importorskip("bitsandbytes")


def eight_bit(model, tuning, precision, recompute):
    plan = bench.plan_of(model, tuning=tuning, precision=precision, recompute=recompute, chunked=True)
    return replace(plan, optimizer=AdamW8bit())


def dora(model, base, precision, recompute):
    plan = bench.plan_of(model, tuning="lora", precision=precision, recompute=recompute, chunked=True)
    return replace(plan, tuning=replace(plan.tuning, base=base, dora=True))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("make", "kind", "precision", "recompute"),
    [
        (eight_bit, "full", "fp32", bench.LAYERS),
        (eight_bit, "full", "bf16-master", 0),
        (eight_bit, "lora", "bf16", 3),
        (dora, Dense(), "fp32", bench.LAYERS),
        (dora, Dense(), "bf16", 0),
        (dora, Nf4(), "bf16-master", bench.LAYERS),
    ],
)
def test_estimate_rehearsal_and_real_step_agree(model, make, kind, precision, recompute):
    plan = make(model, kind, precision, recompute)
    check_all(plan)


@pytest.mark.parametrize("base", [Dense(), pytest.param(Nf4(), marks=pytest.mark.slow)], ids=str)
def test_a_gradient_is_multiplied_with_magnitudes_beside_what_they_multiplied(base):
    """Three tensors of an output's width beside its gradient: 4 · 5.5 hidden states where one linear makes both halves
    of a gate. Backward was eight too low."""
    config, spec = tiny(
        "phi3", hidden_size=512, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1408,
        num_hidden_layers=3, vocab_size=600,
    )  # fmt: skip
    plan = plan_for(
        spec, hardware=gpu("h100"), tuning="lora", precision="bf16", kernels="liger", seq_len=512, rows=2, chunk=64,
        attention="flash",
    )  # fmt: skip
    plan = replace(plan, tuning=replace(plan.tuning, dora=True, base=base))
    assert abs(hidden_states_off(plan, config)[Phase.BACKWARD]) < 0.1
