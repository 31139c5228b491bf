"""Embedding and head trained whole beside adapters: predicted, rehearsed and measured, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.spec.plan import Dense, Nf4
from laws import test_memory_prediction, test_rehearsal_real_step
from laws.test_memory_prediction import bench

BOTH = ("embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def model():
    return bench.small_model()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("tables", "precision", "recompute", "accumulation", "layers", "base"),
    [
        (BOTH, "fp32", 0, 1, (), Dense()),
        (BOTH, "bf16-master", 3, 2, (), Dense()),
        (BOTH, "bf16-master", bench.LAYERS, 1, (), Nf4()),
        (("embed_tokens",), "bf16-master", bench.LAYERS, 1, (4, 5), Dense()),
        (("lm_head",), "bf16", 0, 1, (4, 5), Dense()),
    ],
)
def test_estimate_rehearsal_and_real_step_agree(
    model, tables, precision, recompute, accumulation, layers, base
):
    """The estimate within 1 % of the peak and 2 % of the phases, the rehearsal within 1 % of every phase."""
    if base != Dense():
        pytest.importorskip("bitsandbytes")
    plan = bench.plan_of(
        model,
        tuning="lora",
        precision=precision,
        recompute=recompute,
        chunked=True,
        accumulation=accumulation,
    )
    plan = replace(plan, tuning=replace(plan.tuning, modules_to_save=tables, layers=layers, base=base))
    test_memory_prediction.check(plan)
    test_rehearsal_real_step.check(plan)
