"""A rehearsal is held against a real step of the same plan on the CPU, every live tensor counted.

Same model, same engine, same rows; the one is on fake tensors. Tolerance 1 % of the peak, and of every phase.
"""

import pytest
from transformers import LlamaConfig

from fitune.rehearse.step import record_step
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.predictions import Phase
from laws import test_memory_prediction
from laws.test_memory_prediction import ROWS, bench, measured_peaks

TOLERANCE = 0.01
LAYERS = bench.LAYERS


def check(plan, measured=None):
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    measured = measured or measured_peaks(plan)
    config = LlamaConfig(**{key: value for key, value in bench.CONFIG.items() if key != "model_type"})
    trace = record_step(plan, config, rows=ROWS, labels=rows.supervised_tokens)
    rehearsed = {phase: sum(kinds.values()) for phase, kinds in peaks_by_kind(trace, on_cuda=False).items()}
    table = {phase.value: (rehearsed[phase], measured[phase]) for phase in Phase}
    assert max(rehearsed.values()) == pytest.approx(max(measured.values()), rel=TOLERANCE), table
    for phase in Phase:
        assert rehearsed[phase] == pytest.approx(measured[phase], rel=TOLERANCE), table


def check_all(plan, *, peak=TOLERANCE):
    """The estimate within 1 % of the real step's peak and 2 % of its phases, the rehearsal within 1 % of each."""
    measured = measured_peaks(plan)
    test_memory_prediction.check(plan, measured, peak=peak)
    check(plan, measured)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("tuning", "precision", "recompute", "chunked"),
    [
        ("full", "fp32", LAYERS // 2, False),
        ("full", "bf16", LAYERS, False),
        ("lora", "fp32", 0, False),
        ("lora", "bf16-master", LAYERS // 2, True),
        *(
            slow(tuning, precision, recompute, chunked)
            for tuning in ("full", "lora")
            for precision in ("fp32", "bf16", "bf16-master")
            for recompute in (0, LAYERS // 2, LAYERS)
            for chunked in (False, True)
        ),
    ],
)
def test_the_rehearsal_is_the_real_step(model, tuning, precision, recompute, chunked):
    check(bench.plan_of(model, tuning=tuning, precision=precision, recompute=recompute, chunked=chunked))


@pytest.mark.parametrize(
    ("tuning", "precision", "recompute"),
    [
        ("full", "fp16", LAYERS),
        slow("full", "fp32", 3),
        slow("lora", "bf16", 0),
        slow("lora", "bf16-master", 3),
    ],
)
def test_with_accumulation(model, tuning, precision, recompute):
    check(
        bench.plan_of(
            model, tuning=tuning, precision=precision, recompute=recompute, chunked=True, accumulation=2
        )
    )
