"""How a run ends: complete, interrupted or failed, report.json says so and what was measured."""

import math
import time
from dataclasses import replace

from fitune.errors import FituneError
from fitune.spec.disk import write_atomically
from fitune.spec.reports import RunReport, Sample, Status
from fitune.spec.serial import to_json
from fitune.track.jsonl import read_metrics
from fitune.train.current import Run
from fitune.train.export import export_result
from fitune.train.failure import TRACEBACK, traceback_text
from fitune.train.samples import compare_samples
from fitune.train.summary import summarise


def complete(current: Run) -> RunReport:
    """Answer the samples again, export, then write report.json."""
    report = _summary(current, "complete", "")
    current.where.doing = "answering samples"
    report = replace(report, samples=_samples_after(current))
    current.where.doing = "exporting"
    report = replace(report, exported=_exported(current, report))
    return _write(current, report)


def interrupted(current: Run, reason: str) -> RunReport:
    return _write(current, _summary(current, "interrupted", reason))


def failed(current: Run, explained: FituneError, cause: Exception) -> RunReport | None:
    """Write down what ended the run; None, and a note, when not even that can be written."""
    try:
        if cause is not explained:
            write_atomically(current.directory / TRACEBACK, traceback_text(cause))
        report = _summary(current, "failed", explained.message)
        return _write(current, replace(report, failure=current.where.failure(explained)))
    except (OSError, FituneError) as problem:
        current.callbacks.on_note(f"report.json could not be written: {problem}")
        return None


def _summary(current: Run, status: Status, reason: str) -> RunReport:
    return summarise(
        read_metrics(current.log.path),
        current.data,
        model=None if current.prepared is None else current.model,
        status=status,
        reason=reason,
        meter_kind=current.meter.kind,
        seconds=time.perf_counter() - current.began,
        steps_of_other_plan=current.steps_of_other_plan,
        best_eval_loss=None if math.isinf(current.best_eval_loss) else current.best_eval_loss,
        untold=current.retries,
    )


def _write(current: Run, report: RunReport) -> RunReport:
    write_atomically(current.directory / "report.json", to_json(report))
    return report


def _samples_after(current: Run) -> tuple[Sample, ...]:
    if not current.samples:
        return ()
    return compare_samples(current.directory, current.model, current.samples, current.callbacks.answer)


def _exported(current: Run, report: RunReport) -> str:
    return str(export_result(current.plan, current.model, current.tokenizer, report))
