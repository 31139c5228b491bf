"""DoRA and 8-bit AdamW: predicted, rehearsed and measured on the CPU, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.spec.plan import AdamW8bit, Dense, Nf4
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import bench

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def model():
    return bench.small_model()


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
    """The estimate within 1 % of the peak and 2 % of the phases, the rehearsal within 1 % of every phase."""
    plan = make(model, kind, precision, recompute)
    test_memory_prediction.check(plan)
    test_rehearsal_real_step.check(plan)
