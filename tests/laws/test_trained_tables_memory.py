"""Embedding and head trained whole beside adapters: predicted, rehearsed and measured, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.values.plan import Dense, Nf4
from laws.test_memory_prediction import bench
from laws.test_rehearsal_real_step import check_all

BOTH = ("embed_tokens", "lm_head")


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
    check_all(plan)
