"""Bisection against brute force: every number of recomputed blocks tried."""

import pytest

from fitune.estimate.predict import largest_batch
from fitune.estimate.step import describe_step
from fitune.planner.fit import cheapest_blocks, fewest_blocks, peak_of
from plans import gpu, known, plan_for, small_llama


def all_peaks(plan):
    step = describe_step(plan, largest_batch(plan))
    return [peak_of(step, blocks=n, loss=plan.loss) for n in range(plan.model.num_layers + 1)]


def first_fit(peaks, usable):
    return next((n for n, peak in enumerate(peaks) if peak <= usable), None)


PLANS = [
    plan_for(
        model, tuning=tuning, precision=precision, hardware=gpu("h100"), seq_len=seq_len, rows=rows,
        accumulation=accumulation, chunk=chunk,
    )
    for model in (known("llama-3.1-8b"), known("qwen3-0.6b"), known("gemma-3-4b"), known("mixtral-8x7b"), small_llama())
    for tuning in ("full", "lora")
    for precision in ("bf16-master", "fp32")
    for seq_len, rows, accumulation, chunk in ((64, 1, 1, 0), (2048, 1, 4, 256), (2048, 8, 1, 1024))
]  # fmt: skip


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda p: f"{p.model.name}-{p.precision}-{p.batch.micro_batch_tokens}"
)
def test_the_first_count_that_fits_is_found(plan):
    peaks = all_peaks(plan)
    counts = range(len(peaks))
    limits = {peak + delta for peak in peaks for delta in (-1, 0, 1)} | {0, 2 * max(peaks)}
    for usable in limits:
        assert fewest_blocks(peaks.__getitem__, counts, usable=usable) == first_fit(peaks, usable)
    assert peaks[cheapest_blocks(peaks.__getitem__, counts)] == min(peaks)


def test_a_pinned_count_is_the_only_one_tried():
    for usable, found in ((7, 2), (6, None)):
        assert fewest_blocks([9, 5, 7].__getitem__, range(2, 3), usable=usable) == found


def test_a_valley_in_the_middle_is_found():
    peaks = [100, 90, 80, 70, 72, 74, 76, 78]
    assert cheapest_blocks(peaks.__getitem__, range(8)) == 3
    for usable, found in ((75, 3), (85, 2), (69, None)):
        assert fewest_blocks(peaks.__getitem__, range(8), usable=usable) == found
