"""LoRA in some blocks only: predicted, rehearsed and measured on the CPU, every live tensor counted.

Backward ends at the first adapted block: those before it keep nothing, recomputed or not.
"""

from dataclasses import replace

import pytest

from fitune.estimate.predict import predict_memory
from fitune.values.plan import Dense, Nf4
from laws.test_memory_prediction import bench
from laws.test_rehearsal_real_step import check_all

LAST = bench.LAYERS - 1


def adapted_in(model, layers, *, precision="fp32", recompute=0, chunked=True, **different):
    plan = bench.plan_of(model, tuning="lora", precision=precision, recompute=recompute, chunked=chunked)
    return replace(plan, tuning=replace(plan.tuning, layers=layers, **different))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("layers", "precision", "recompute", "base"),
    [
        ((LAST,), "fp32", 0, Dense()),
        ((LAST - 1, LAST), "bf16", bench.LAYERS, Dense()),
        ((0, 1), "fp32", 3, Dense()),
        ((1, 3), "bf16-master", 2, Dense()),
        ((1, 3), "fp32", 0, Nf4()),
        ((2, LAST), "bf16", 0, Dense()),
        ((2, LAST), "bf16", bench.LAYERS, Nf4()),
    ],
)
def test_estimate_rehearsal_and_real_step_agree(model, layers, precision, recompute, base):
    if base != Dense():
        pytest.importorskip("bitsandbytes")
    plan = adapted_in(model, layers, precision=precision, recompute=recompute, chunked=False, base=base)
    check_all(plan)


def test_the_fewer_of_the_last_blocks_the_less_memory(model):
    peaks = [
        predict_memory(adapted_in(model, tuple(range(first, bench.LAYERS)))).peak_bytes
        for first in range(bench.LAYERS)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == bench.LAYERS


def test_all_blocks_by_number_are_all_blocks(model):
    by_number = adapted_in(model, tuple(range(bench.LAYERS)))
    assert predict_memory(by_number) == predict_memory(adapted_in(model, ()))
