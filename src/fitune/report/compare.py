"""A run read back, and what was predicted next to what was measured: the only place where the two meet.

In a run directory plan.json must be there. Everything else may be missing: a run that failed or is still going has a
report too.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from fitune.errors import RunDirectoryError, Shortage
from fitune.files import path_fault, read_text
from fitune.spec.plan import Plan
from fitune.spec.predictions import Estimate, Phase, Rejection, WholeRun
from fitune.spec.reports import RankReport, Restart, Retry, RunReport, StepReport, settled_steps
from fitune.spec.run_directory import require_real_files
from fitune.spec.serial import from_json
from fitune.track.metrics import read_metrics
from fitune.track.record import Tracked, read_tracked
from fitune.units import format_bytes, format_percent, format_rate, format_seconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that was considered and not taken."""

    summary: str
    peak_bytes: int
    step_seconds: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """estimate.json: what was said before the first step. ``serial.to_json`` writes it.

    ``estimate`` is for the run's own data: memory of its heaviest micro-batch, time of its usual one.
    """

    estimate: Estimate
    heaviest_step: int = 0
    """The step (1-based) with the heaviest micro-batch; 0 when the data was not known."""
    heaviest_tokens: int = 0
    allowed_bytes: int = 0
    """Peak of tensors of the largest micro-batch the plan allows: what the plan was fitted by."""
    run: WholeRun | None = None
    """None in files of earlier versions."""
    runners_up: tuple[RunnerUp, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    decisions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Everything a report is made of."""

    directory: Path
    plan: Plan
    prediction: Prediction | None
    steps: tuple[StepReport, ...]
    run: RunReport | None
    """None while the run is going, and when it was killed."""
    recipe: str
    """YAML text, empty when there is none."""
    trackers: tuple[Tracked, ...] = ()

    @property
    def estimate(self) -> Estimate | None:
        return None if self.prediction is None else self.prediction.estimate


def read_run(directory: Path, *, steps: Sequence[StepReport] | None = None) -> RunFiles:
    """Read a run directory; ``steps`` where its metrics.jsonl was read already. Raises RunDirectoryError naming the
    file that is missing or damaged."""
    if fault := path_fault(str(directory)):
        raise RunDirectoryError(fault, hint="the output_dir of a fitune run")
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: no such run directory", hint="the output_dir of a fitune run")
    require_real_files(directory)
    plan = _read(Plan, directory / "plan.json")
    if plan is None:
        raise RunDirectoryError(
            f"{directory}: no plan.json, so this is not the directory of a run",
            hint="the output_dir of a fitune run",
        )
    return RunFiles(
        directory=directory,
        plan=plan,
        prediction=_read(Prediction, directory / "estimate.json"),
        steps=tuple(read_metrics(directory / "metrics.jsonl") if steps is None else steps),
        run=_read(RunReport, directory / "report.json"),
        recipe=_read_text(directory / "recipe.yaml") or "",
        trackers=read_tracked(directory),
    )


def _read(cls: type[T], path: Path) -> T | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return from_json(cls, text)
    except ValueError as error:
        raise RunDirectoryError(f"{path}: {error}", hint=_hint(path)) from None


def _read_text(path: Path) -> str | None:
    try:
        return read_text(path, follow_links=False)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RunDirectoryError(f"{path}: not UTF-8 at byte {error.start}", hint=_hint(path)) from None
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from None


def _hint(path: Path) -> str | None:
    return None if path.name == "plan.json" else f"move {path.name} away: the report is then made without it"


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
class Row:
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
class Measured:
    """Measured figures of a run, from its report or its steps."""

    phases: dict[Phase, int]
    process_bytes: int
    process_kind: str
    tokens_per_second: float | None
    step_seconds: float | None

    @property
    def peak_bytes(self) -> int | None:
        return max(self.phases.values(), default=None)


def compare(
    estimate: Estimate | None, run_report: RunReport | None, steps: Sequence[StepReport] = ()
) -> list[Row]:
    """Rows for each phase of memory, the peak, the whole process, step time and throughput.

    ``steps`` stand in for what a run without a report has not said, and give the step time.
    Tensor bytes are held against tensor bytes: what lies outside of them is only in the row of the process.
    """
    measured = measure(run_report, steps)
    return [
        *_phase_rows(estimate, measured),
        _peak_row(estimate, measured),
        *_rank_rows(estimate, () if run_report is None else run_report.ranks),
        *_process_rows(estimate, measured),
        *_speed_rows(estimate, measured),
    ]


def measure(run_report: RunReport | None, steps: Sequence[StepReport]) -> Measured:
    """Measured figures: from the report where there is one, else from the steps."""
    memory = None if run_report is None else run_report.memory
    skipped = 0 if run_report is None else run_report.steps_of_other_plan
    steps = [step for step in steps if step.step > skipped]
    seconds = [
        step.step_seconds for step in settled_steps(steps, kind=None if memory is None else memory.kind)
    ]
    rate = run_report.tokens_per_second if run_report is not None else _tokens_per_second(steps)
    return Measured(
        phases=dict(memory.phases) if memory is not None else _phase_peaks(steps),
        process_bytes=0 if memory is None else memory.process_bytes,
        process_kind="reserved on the device"
        if memory and memory.kind == "cuda allocated"
        else "resident set",
        tokens_per_second=rate or None,
        step_seconds=statistics.fmean(seconds) if seconds else None,
    )


def comparison_table(rows: Sequence[Row]) -> str:
    """Plain text for the terminal, numbers to the right."""
    return text_table([("", "predicted", "measured", "error"), *(row_texts(row) for row in rows)])


def row_texts(row: Row) -> tuple[str, str, str, str]:
    """Name, predicted, measured and error as text; a dash where one is not known."""
    error = "–" if row.error is None else format_percent(row.error, signed=True)
    return row.what, value_text(row.predicted, row.unit), value_text(row.measured, row.unit), error


def value_text(value: float | None, unit: Unit) -> str:
    if value is None:
        return "–"
    return {"bytes": format_bytes, "seconds": format_seconds, "tokens/s": format_rate}[unit](value)


def _phase_rows(estimate: Estimate | None, measured: Measured) -> list[Row]:
    predicted = (
        {} if estimate is None else {p: sum(terms.values()) for p, terms in estimate.memory.phases.items()}
    )
    return [
        Row(what=name, predicted=predicted.get(phase), measured=measured.phases.get(phase), unit="bytes")
        for phase, name in PHASE_NAMES.items()
        if phase in predicted or phase in measured.phases
    ]


def _peak_row(estimate: Estimate | None, measured: Measured) -> Row:
    predicted = None if estimate is None else estimate.memory.tensor_peak_bytes
    return Row(what=PEAK, predicted=predicted, measured=measured.peak_bytes, unit="bytes")


def _rank_rows(estimate: Estimate | None, ranks: Sequence[RankReport]) -> list[Row]:
    """The peak of each of several processes, held against the one prediction for the largest."""
    predicted = None if estimate is None else estimate.memory.tensor_peak_bytes
    return [
        Row(what=f"  rank {rank.rank}", predicted=predicted, measured=rank.peak_bytes, unit="bytes")
        for rank in ranks
        if rank.memory
    ]


def _process_rows(estimate: Estimate | None, measured: Measured) -> list[Row]:
    """The whole process is predicted only where the estimate says what lies outside the tensors."""
    if not measured.process_bytes:
        return []
    whole = estimate.peak_bytes if estimate is not None and any(estimate.memory.outside.values()) else None
    what = f"Process ({measured.process_kind})"
    return [Row(what=what, predicted=whole, measured=measured.process_bytes, unit="bytes")]


def _speed_rows(estimate: Estimate | None, measured: Measured) -> list[Row]:
    seconds = None if estimate is None else estimate.step_seconds
    rate = None if estimate is None else estimate.tokens_per_second
    return [
        Row(what="Time of a step", predicted=seconds, measured=measured.step_seconds, unit="seconds"),
        Row(what="Throughput", predicted=rate, measured=measured.tokens_per_second, unit="tokens/s"),
    ]


def _phase_peaks(steps: Sequence[StepReport]) -> dict[Phase, int]:
    peaks: dict[Phase, int] = {}
    for step in steps:
        for phase, value in step.memory_bytes.items():
            peaks[phase] = max(value, peaks.get(phase, 0))
    return peaks


def _tokens_per_second(steps: Sequence[StepReport]) -> float | None:
    settled = settled_steps(steps, kind=None)
    seconds = sum(step.step_seconds for step in settled)
    return sum(step.tokens for step in settled) / seconds if seconds else None


def text_table(rows: Sequence[Sequence[str]], *, indent: int = 0) -> str:
    """The first column to the left, the others to the right, each as wide as its widest cell."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = (
        "  ".join(
            [name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))]
        )
        for name, *cells in rows
    )
    return "\n".join((" " * indent + line).rstrip() for line in lines)


_KINDS = {
    "live tensors": "tensors in use when it failed",
    "cuda allocated": "allocated when it failed",
    "process resident": "resident in the whole process when it failed",
}


def shortage_words(shortage: Shortage, *, predicted_bytes: int) -> str:
    """``predicted 52.0 MiB of tensors at the peak; measured 61.2 MiB allocated when it failed, 4.0 MiB more …``."""
    measured = f"{format_bytes(shortage.in_use_bytes)} {_KINDS[shortage.kind]}"
    asked = f", {format_bytes(shortage.asked_bytes)} more asked for" if shortage.asked_bytes else ""
    had = f", of {format_bytes(shortage.capacity_bytes)} there were" if shortage.capacity_bytes else ""
    return (
        f"predicted {format_bytes(predicted_bytes)} of tensors at the peak; measured {measured}{asked}{had}"
    )


def describe_retry(retry: Retry) -> str:
    """Lines for people: what ran out, predicted and measured bytes, and what is tried next."""
    takes = f"{format_bytes(retry.predicted_after_bytes)} predicted"
    return "\n".join(
        [
            f"attempt {retry.attempt}: {retry.reason}",
            f"  {shortage_words(retry.shortage, predicted_bytes=retry.predicted_bytes)}",
            f"  {retry.before} → {retry.after}: the same global batch, {takes}",
            f"  attempt {retry.attempt + 1} {begins(retry)}",
        ]
    )


def describe_restart(restart: Restart) -> str:
    """One line for people: why ranks were replaced, where the new ones began and the time lost."""
    workers = f"{restart.workers} workers"
    if restart.workers != restart.workers_before:
        workers += f" instead of {restart.workers_before}"
    where = f"from step {restart.after_step:,}" if restart.after_step else "from the beginning"
    lost = f"; {restart.lost_seconds:,.0f} s lost" if restart.again_at else ""
    again = f", {restart.lost_steps:,} step{'s' * (restart.lost_steps != 1)} done again" * bool(
        restart.lost_steps
    )
    return f"{restart.cause}; {workers} went on {where}{again}{lost}"


def begins(retry: Retry) -> str:
    return f"goes on from step {retry.after_step}" if retry.after_step else "begins anew"
