"""The end of a run, complete, interrupted or failed: report.json with all that metrics.jsonl says was measured."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from shlex import quote

from torch import Tensor

from fitune.errors import FituneError, TrainingFailed, installed_versions
from fitune.files import write_atomically
from fitune.measure.memory import has_expandable_segments, highest_peaks, process_bytes
from fitune.models.low_bit.quantised import count_weights, elements
from fitune.track.metrics import read_metrics
from fitune.train.again import trained_kind
from fitune.train.current import Run
from fitune.train.evaluate import compare_samples
from fitune.train.export import handover_of
from fitune.train.failure import traceback_text
from fitune.units import as_ranges
from fitune.values.reports import (
    STOPPED_IN_EXPORT,
    MeasuredMemory,
    RunReport,
    Sample,
    Status,
    settled_steps,
)
from fitune.values.run_directory import traceback_of
from fitune.values.serial import to_json


def complete(current: Run, weights: Mapping[str, Tensor] | None) -> RunReport:
    """Write report.json, save what was trained, answer the samples again, merge, write report.json anew.

    ``weights``: what was trained, where it is divided over ranks; asked for once each and in their order.
    """
    report = _summary(current, "complete", "")
    current.where.step = report.steps  # also of a run that was resumed after its last step
    current.is_trained = True
    current.where.doing = "exporting"
    failure = current.where.failure(TrainingFailed(STOPPED_IN_EXPORT))
    _write(current, replace(report, status="failed", reason=STOPPED_IN_EXPORT, failure=failure))
    handover = handover_of(
        current.model, weights, plan=current.plan, tokenizer=current.tokenizer, report=report,
        on_note=current.callbacks.on_note,
    )  # fmt: skip
    current.exported = str(handover.trained(secure=True))
    current.where.doing = "answering samples"
    samples: tuple[Sample, ...] = ()
    if current.samples:
        samples = compare_samples(current.directory, current.model, current.samples, current.callbacks.answer)
    report = replace(report, exported=current.exported, samples=samples)
    if current.plan.run.export == "merged":
        current.where.doing = "exporting"
        merged, loss = handover.merged(lambda: current.data)
        report = replace(report, exported=str(merged), merged_loss=loss)
    return _write(current, report)


def explain_what_is_saved(current: Run, error: FituneError) -> None:
    """Add to ``error`` that training itself is done, where its weights are and how its export is tried again.

    Its export can be done again from what ``train.saving.keep_trained`` found or saved.
    """
    if not current.is_trained:
        return
    directory, kept = current.plan.run.output_dir, current.exported or current.kept
    saved = f"its {trained_kind(current.plan)} weights are saved in {kept}, but " if kept else ""
    error.message = f"trained; {saved}{current.where.doing} failed: {error.message}"
    again = (
        f"`fitune export {quote(directory)}` tries it again without training"
        if kept
        else "nothing holds what was trained: mend the cause, then --overwrite"
    )
    error.hint = f"{again}; {error.hint or ''}".rstrip("; ")


def interrupted(current: Run, reason: str) -> RunReport:
    """Writes the report of a run that stopped early for ``reason``, and returns it."""
    report = _summary(current, "interrupted", reason)
    return _write(current, replace(report, exported=current.exported))


def failed(current: Run, explained: FituneError, cause: Exception) -> RunReport | None:
    """Write down what ended the run; None, and a note, when not even that can be written."""
    try:
        if cause is not explained:
            write_atomically(current.directory / traceback_of(current.ranks.rank), traceback_text(cause))
        report = _summary(current, "failed", explained.message)
        failure = current.where.failure(explained)
        return _write(current, replace(report, exported=current.exported, failure=failure))
    except (OSError, FituneError) as problem:
        current.callbacks.on_note(f"report.json could not be written: {problem}")
        return None


def keep_log(current: Run) -> None:
    """Put metrics.jsonl back if somebody removed or changed it, and say so."""
    note = "" if current.log is None else current.log.put_back()
    if note:
        current.callbacks.on_note(note)


def _summary(current: Run, status: Status, reason: str) -> RunReport:
    """The report of a run that ends so, also before its model is loaded, of all that metrics.jsonl says.

    Memory and speed are of the steps of this plan.
    """
    keep_log(current)
    steps = read_metrics(current.directory / "metrics.jsonl")
    data, kind, ranks = current.data, current.meter.kind, current.rows
    model = None if current.prepared is None else current.model
    lost = set(range(1, steps[-1].step + 1 if steps else 1)) - {step.step for step in steps}
    gap = f"metrics.jsonl lacks steps {as_ranges(lost)}: every figure is without them" if lost else ""
    of_this_plan = [step for step in steps if step.step > current.steps_of_other_plan]
    steady = settled_steps(of_this_plan, kind=kind)
    busy, waited = sum(s.step_seconds for s in steady), sum(s.data_seconds for s in steady)
    tokens = sum(s.tokens for s in steady)
    evaluated = [s.eval_loss for s in steps if s.eval_loss is not None]
    if not math.isinf(current.best_eval_loss):
        evaluated.append(current.best_eval_loss)
    parameters = [] if model is None else list(model.whole.parameters())
    peaks = highest_peaks((*(step.memory_bytes for step in of_this_plan), *(rank.memory for rank in ranks)))
    device = None if model is None else model.device
    memory = MeasuredMemory(
        kind=kind, phases=peaks, process_bytes=0 if device is None else process_bytes(device),
        expandable_segments=None if device is None else has_expandable_segments(device),
    )  # fmt: skip
    return RunReport(
        status=status,
        reason="; ".join(filter(None, (reason, gap))),
        steps=steps[-1].step if steps else 0,
        total_steps=steps[-1].total_steps if steps else 0,
        first_loss=steps[0].loss if steps else 0.0,
        final_loss=steps[-1].loss if steps else 0.0,
        best_eval_loss=min(evaluated, default=None),
        eval_loss_before=steps[0].eval_loss_before if steps else None,
        eval_loss=next((s.eval_loss for s in reversed(steps) if s.eval_loss is not None), None),
        seconds=time.perf_counter() - current.began,
        tokens=sum(s.tokens for s in steps),
        supervised_tokens=sum(s.supervised_tokens for s in steps),
        tokens_per_second=tokens / busy if busy else 0.0,
        tokens_per_second_with_data=tokens / (busy + waited) if busy else 0.0,
        mfu=sum(s.mfu * s.step_seconds for s in steady) / busy if busy else 0.0,
        memory=memory if peaks else None,
        train_data=data.train_ledger,
        eval_data=data.eval_ledger,
        trainable_parameters=sum(elements(p) for p in parameters if p.requires_grad),
        total_parameters=0 if model is None else count_weights(model.whole),
        retries=(*(retry for step in steps for retry in step.retries), *current.retries),
        restarts=(*(restart for step in steps for restart in step.restarts), *current.restarts),
        steps_of_other_plan=current.steps_of_other_plan,
        ranks=ranks,
        versions=installed_versions(("fitune", "torch", "transformers", "peft")),
        contents=data.contents,
    )


def _write(current: Run, report: RunReport) -> RunReport:
    if current.ranks.is_first:
        write_atomically(current.directory / "report.json", to_json(report))
    return report
