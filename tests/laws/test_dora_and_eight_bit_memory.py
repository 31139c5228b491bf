"""DoRA and 8-bit AdamW: predicted, rehearsed and measured on the CPU, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.values.plan import AdamW8bit, Dense, Nf4
from laws.test_memory_prediction import bench
from laws.test_rehearsal_real_step import check_all

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
