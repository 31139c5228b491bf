"""Predicted next to measured: the only place where the two meet."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fitune.units import format_bytes, format_percent, format_rate, format_seconds, text_table
from fitune.values.predictions import WORKSPACE, Estimate, Phase
from fitune.values.reports import RunReport, StepReport, settled_steps

Unit = Literal["bytes", "seconds", "tokens/s"]

PHASE_NAMES = {
    Phase.IDLE: "Between steps",
    Phase.FORWARD: "Forward",
    Phase.LOSS: "Loss",
    Phase.BACKWARD: "Backward",
    Phase.UPDATE: "Update",
}
PEAK = "Peak of tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity. None: not predicted, or not measured."""

    what: str
    predicted: float | None
    measured: float | None
    unit: Unit

    @property
    def error(self) -> float | None:
        """Relative error: (predicted − measured) / measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measured figures of a run, from its report or its steps."""

    phases: dict[Phase, int]
    on_cuda: bool
    process_bytes: int
    process_kind: str
    tokens_per_second: float | None
    step_seconds: float | None

    @property
    def peak_bytes(self) -> int | None:
        """Most measured bytes in any phase; None where no phase was measured."""
        return max(self.phases.values(), default=None)


def compare(
    estimate: Estimate | None, run_report: RunReport | None, steps: Sequence[StepReport] = ()
) -> list[Figure]:
    """Rows for each phase of memory, the peak, the whole process, step time and throughput.

    ``steps`` stand in for what a run without a report has not said, and give the step time.
    Tensor bytes are held against tensor bytes; CUDA's counter has cuBLAS' workspace among them, so there the prediction
    has it too. What else lies outside of tensors is only in the row of the process.
    """
    measured = measure(run_report, steps)
    phases: dict[Phase, int] = {}
    peak = whole = seconds = rate = None
    if estimate is not None:
        beside = estimate.memory.outside.get(WORKSPACE, 0) if measured.on_cuda else 0
        phases = {phase: sum(terms.values()) + beside for phase, terms in estimate.memory.phases.items()}
        peak = estimate.memory.tensor_peak_bytes + beside
        # of the whole process nothing is predicted where the estimate does not say what lies outside the tensors
        whole = estimate.reserved_bytes if any(estimate.memory.outside.values()) else None
        seconds, rate = estimate.step_seconds, estimate.tokens_per_second
    rows = [
        Figure(what=name, predicted=phases.get(phase), measured=measured.phases.get(phase), unit="bytes")
        for phase, name in PHASE_NAMES.items()
        if phase in phases or phase in measured.phases
    ]
    rows.append(Figure(what=PEAK, predicted=peak, measured=measured.peak_bytes, unit="bytes"))
    # each of several processes is held against the one prediction for the largest
    rows += [
        Figure(what=f"  rank {rank.rank}", predicted=peak, measured=rank.peak_bytes, unit="bytes")
        for rank in (() if run_report is None else run_report.ranks)
        if rank.memory
    ]
    if measured.process_bytes:
        what = f"Process ({measured.process_kind})"
        rows.append(Figure(what=what, predicted=whole, measured=measured.process_bytes, unit="bytes"))
    rows.append(
        Figure(what="Time of a step", predicted=seconds, measured=measured.step_seconds, unit="seconds")
    )
    rows.append(
        Figure(what="Throughput", predicted=rate, measured=measured.tokens_per_second, unit="tokens/s")
    )
    return rows


def measure(run_report: RunReport | None, steps: Sequence[StepReport]) -> MeasuredRun:
    """Measured figures: from the report where there is one, else from the steps."""
    memory = None if run_report is None else run_report.memory
    skipped = 0 if run_report is None else run_report.steps_of_other_plan
    steps = [step for step in steps if step.step > skipped]
    seconds = [
        step.step_seconds for step in settled_steps(steps, kind=None if memory is None else memory.kind)
    ]
    if run_report is not None:
        rate = run_report.tokens_per_second
    else:
        settled = settled_steps(steps, kind=None)
        rate = sum(step.tokens for step in settled) / (sum(step.step_seconds for step in settled) or math.inf)
    phases = {} if memory is None else dict(memory.phases)
    for step in steps if memory is None else ():
        for phase, value in step.memory_bytes.items():
            phases[phase] = max(value, phases.get(phase, 0))
    on_cuda, process_kind = memory is not None and memory.kind == "cuda allocated", "resident set"
    if memory is not None and on_cuda:
        without = ", without expandable segments" * (memory.expandable_segments is False)
        process_kind = f"reserved on the device{without}"
    return MeasuredRun(
        phases=phases,
        on_cuda=on_cuda,
        process_bytes=0 if memory is None else memory.process_bytes,
        process_kind=process_kind,
        tokens_per_second=rate or None,
        step_seconds=statistics.fmean(seconds) if seconds else None,
    )


def comparison_table(rows: Sequence[Figure]) -> str:
    """Plain text for the terminal, numbers to the right."""
    return text_table([("", "predicted", "measured", "error"), *(row_texts(row) for row in rows)])


def row_texts(row: Figure) -> tuple[str, str, str, str]:
    """Name, predicted, measured and error as text; a dash where one is not known."""
    error = "–" if row.error is None else format_percent(row.error, signed=True)
    return row.what, value_text(row.predicted, row.unit), value_text(row.measured, row.unit), error


def value_text(value: float | None, unit: Unit) -> str:
    """The value with its unit, as ``9.08 GiB``; ``–`` for None."""
    if value is None:
        return "–"
    return {"bytes": format_bytes, "seconds": format_seconds, "tokens/s": format_rate}[unit](value)
