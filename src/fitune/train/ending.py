"""How a run ends: complete, interrupted or failed, report.json says so and what was measured."""

import math
import time
from dataclasses import replace

from fitune.errors import FituneError
from fitune.files import write_atomically
from fitune.spec.reports import RunReport, Sample, Status
from fitune.spec.serial import to_json
from fitune.track.jsonl import read_metrics
from fitune.train.current import Run
from fitune.train.export import Handover, trained_kind
from fitune.train.failure import TRACEBACK, traceback_text
from fitune.train.samples import compare_samples
from fitune.train.summary import summarise


def complete(current: Run) -> RunReport:
    """Save what was trained before anything else can fail, answer the samples again, merge, write report.json."""
    report = _summary(current, "complete", "")
    current.where.step = report.steps  # also of a run that was resumed after its last step
    current.is_trained = True
    current.where.doing = "exporting"
    handover = _handover(current, report)
    current.exported = str(handover.trained(secure=True))
    current.where.doing = "answering samples"
    report = replace(report, exported=current.exported, samples=_samples_after(current))
    if current.plan.run.export == "merged":
        current.where.doing = "exporting"
        merged, loss = handover.merged(lambda: current.data)
        report = replace(report, exported=str(merged), merged_loss=loss)
    return _write(current, report)


def tell_what_is_saved(current: Run, error: FituneError) -> None:
    """Say in ``error`` that training itself is done, where its weights are and how its export is tried again."""
    if not current.is_trained:
        return
    directory = current.plan.run.output_dir
    saved = (
        f"its {trained_kind(current.plan)} weights are saved in {current.exported}, but "
        if current.exported
        else ""
    )
    error.message = f"trained; {saved}{current.where.doing} failed: {error.message}"
    error.hint = f"`fitune export {directory}` tries it again without training; {error.hint or ''}".rstrip(
        "; "
    )


def interrupted(current: Run, reason: str) -> RunReport:
    report = _summary(current, "interrupted", reason)
    return _write(current, replace(report, exported=current.exported))


def failed(current: Run, explained: FituneError, cause: Exception) -> RunReport | None:
    """Write down what ended the run; None, and a note, when not even that can be written."""
    try:
        if cause is not explained:
            write_atomically(current.directory / TRACEBACK, traceback_text(cause))
        report = _summary(current, "failed", explained.message)
        failure = current.where.failure(explained)
        return _write(current, replace(report, exported=current.exported, failure=failure))
    except (OSError, FituneError) as problem:
        current.callbacks.on_note(f"report.json could not be written: {problem}")
        return None


def keep_log(current: Run) -> None:
    """Put metrics.jsonl back if somebody removed or changed it, and say so."""
    note = current.log.put_back()
    if note:
        current.callbacks.on_note(note)


def _summary(current: Run, status: Status, reason: str) -> RunReport:
    keep_log(current)
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


def _handover(current: Run, report: RunReport) -> Handover:
    say = current.callbacks.on_note
    return Handover(
        plan=current.plan, model=current.model, tokenizer=current.tokenizer, report=report, say=say
    )
