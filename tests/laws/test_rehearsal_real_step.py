"""A rehearsal is held against a real step of the same plan on the CPU, every live tensor counted.

Same model, same engine, same rows; the one is on fake tensors. Tolerance 1 % of the peak, and of every phase.
"""

import pytest
from transformers import LlamaConfig

from fitune.rehearse.peaks import peaks_by_kind
from fitune.rehearse.step import record_step
from fitune.spec.reports import Phase
from laws.test_memory_prediction import ROWS, bench

TOLERANCE = 0.01
LAYERS = bench.LAYERS


@pytest.fixture(scope="module")
def model():
    return bench.small_model()


def check(plan):
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    measured = bench.measured_peaks(plan, rows)
    config = LlamaConfig(**{key: value for key, value in bench.CONFIG.items() if key != "model_type"})
    trace = record_step(plan, config, rows=ROWS, labels=rows.supervised_tokens)
    rehearsed = {phase: sum(kinds.values()) for phase, kinds in peaks_by_kind(trace, on_cuda=False).items()}
    table = {phase.value: (rehearsed[phase], measured[phase]) for phase in Phase}
    assert max(rehearsed.values()) == pytest.approx(max(measured.values()), rel=TOLERANCE), table
    for phase in Phase:
        assert rehearsed[phase] == pytest.approx(measured[phase], rel=TOLERANCE), table


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("recompute", [0, LAYERS // 2, LAYERS])
@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "chunked"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
def test_the_rehearsal_is_the_real_step(model, tuning, recompute, chunked, precision):
    check(bench.plan_of(model, tuning=tuning, precision=precision, recompute=recompute, chunked=chunked))


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize(("precision", "recompute"), [("fp32", 3), ("bf16", 0), ("fp16", LAYERS)])
def test_with_accumulation(model, tuning, precision, recompute):
    check(
        bench.plan_of(
            model, tuning=tuning, precision=precision, recompute=recompute, chunked=True, accumulation=2
        )
    )
