"""Predicted against measured: a real step of a small model, every live tensor counted.

Tolerance 1 % of the peak: what remains is index lists, scalars and the rotary table's making. bench/cpu_memory.py
runs more plans and prints them.
"""

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from fitune.values.plan import Sgd
from fitune.values.predictions import Phase

_FILE = Path(__file__).parents[2] / "bench" / "cpu_memory.py"
_SPEC = spec_from_file_location("cpu_memory", _FILE)
bench = module_from_spec(_SPEC)
sys.modules["cpu_memory"] = bench
_SPEC.loader.exec_module(bench)

TOLERANCE = 0.01
ROWS = (24, 16, 40, 32)


def measured_peaks(plan):
    return bench.measured_peaks(plan, bench.random_rows(ROWS, vocab_size=plan.model.vocab_size))


def check(plan, measured=None, *, peak=TOLERANCE):
    """The estimate within 1 % (``peak``) of the real step's peak and 2 % of its phases."""
    measured = measured or measured_peaks(plan)
    predicted = bench.predicted_peaks(plan, bench.random_rows(ROWS, vocab_size=plan.model.vocab_size))
    table = {phase.value: (predicted[phase], measured[phase]) for phase in Phase}
    assert max(predicted.values()) == pytest.approx(max(measured.values()), rel=peak), table
    for phase in (Phase.IDLE, Phase.LOSS, Phase.BACKWARD, Phase.UPDATE):
        assert predicted[phase] == pytest.approx(measured[phase], rel=0.02), table


@pytest.mark.parametrize(
    ("tuning", "recompute", "chunked"),
    [
        ("full", 0, False), ("full", bench.LAYERS // 2, True), ("full", bench.LAYERS, False),
        ("lora", 0, True), ("lora", bench.LAYERS // 2, False), ("lora", bench.LAYERS, True),
    ],
)  # fmt: skip
def test_fp32_peak_is_predicted(model, tuning, recompute, chunked):
    check(bench.plan_of(model, tuning=tuning, precision="fp32", recompute=recompute, chunked=chunked))


@pytest.mark.parametrize(("tuning", "recompute"), [("full", 3), ("lora", 0)])
def test_bf16_with_masters_is_predicted(model, tuning, recompute):
    check(bench.plan_of(model, tuning=tuning, precision="bf16-master", recompute=recompute, chunked=True))


def test_accumulation_and_sgd_are_predicted(model):
    plan = bench.plan_of(model, tuning="full", precision="fp32", recompute=2, chunked=True, accumulation=2)
    check(replace(plan, optimizer=Sgd(momentum=0.9)))


def test_written_out_attention_is_predicted(model):
    """Rows are of equal length here: scores are counted as if they were."""
    plan = bench.plan_of(model, tuning="full", precision="fp32", recompute=0, chunked=True)
    rows = bench.random_rows((32,) * 4, vocab_size=plan.model.vocab_size)
    predicted, measured, error = bench.peak_error(replace(plan, attention="eager"), rows)
    assert abs(error) < TOLERANCE, (predicted, measured)
