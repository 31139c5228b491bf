"""One run from a Plan to a RunReport: resume, train, evaluate, save, export. It decides nothing.

Everything a run leaves behind is written here, inside its directory: plan.json, metrics.jsonl, checkpoints/,
the export and report.json.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from fitune.checkpoint.durable import write_atomically
from fitune.checkpoint.paths import lock_run_directory
from fitune.checkpoint.save import save_checkpoint
from fitune.data.dataset import PreparedData, prepare_data
from fitune.data.formats import Conversation
from fitune.data.loader import Loader, LoaderState
from fitune.errors import FituneError, TrainingFailed
from fitune.measure.memory import MemoryMeter, memory_meter
from fitune.models.weights import load_tokenizer
from fitune.spec.plan import Plan
from fitune.spec.reports import RunReport, Sample, StepReport
from fitune.spec.serial import to_json
from fitune.track.jsonl import MetricsLog, read_metrics
from fitune.track.sinks import Sink
from fitune.train.directory import require_own_directory
from fitune.train.evaluate import evaluate
from fitune.train.export import export_result
from fitune.train.loop import train
from fitune.train.prepare import Prepared, prepare
from fitune.train.resume import Start, capture, require_same_rows, restore, where_to_start
from fitune.train.samples import Answer, answer_before, compare_samples
from fitune.train.summary import summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """What the caller is told and asked while the run goes on."""

    on_data: Callable[[PreparedData, Loader], None]
    """Once the data is read and before the model is: what every batch will hold is known from here on."""
    on_note: Callable[[str], None]
    """A line for people: what is being done, a checkpoint that was passed over."""
    stop_asked: Callable[[], bool]
    """Asked after every step; True saves and ends the run as interrupted."""
    answer: Answer
    """Answers held-out prompts with the model as it is, for the samples before and after."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """What the parts of a run share."""

    plan: Plan
    callbacks: Callbacks
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    prepared: Prepared
    loader: Loader
    meter: MemoryMeter
    log: MetricsLog
    sinks: Sequence[Sink]
    position: LoaderState = field(default_factory=lambda: LoaderState(epoch=0, position=0))
    best_eval_loss: float = math.inf

    @property
    def directory(self) -> Path:
        return Path(self.plan.run.output_dir)

    @property
    def samples(self) -> Sequence[Conversation]:
        """The held-out conversations that are answered before and after training."""
        return self.data.eval_examples[: self.plan.run.samples]


def run(
    plan: Plan,
    *,
    callbacks: Callbacks,
    sinks: Sequence[Sink] = (),
    resume: bool | str = False,
    files: Mapping[str, str] | None = None,
) -> RunReport:
    """Execute ``plan`` in its output directory. ``files`` (name -> text) are written beside plan.json.

    ``resume``: True for the newest valid checkpoint (from the start when there is none), or a checkpoint's path.
    Raises FituneError; report.json then says what happened and how far the run came.
    """
    directory = Path(plan.run.output_dir)
    require_own_directory(plan)
    with lock_run_directory(directory):
        start = where_to_start(directory, plan, resume=resume)
        for warning in start.warnings:
            callbacks.on_note(warning)
        for name, text in {"plan.json": to_json(plan), **(files or {})}.items():
            write_atomically(directory / name, text)
        began = time.perf_counter()
        with MetricsLog(directory / "metrics.jsonl") as log:
            log.truncate_after(start.step)
            current = _set_up(plan, callbacks, sinks, log, start)
            return _train_and_report(current, start, began)


def _set_up(plan: Plan, callbacks: Callbacks, sinks: Sequence[Sink], log: MetricsLog, start: Start) -> _Run:
    """Tokenise before the model is loaded: bad data should not cost the wait for the weights."""
    tokenizer = load_tokenizer(plan.model_path)
    data = prepare_data(
        plan.data,
        tokenizer=tokenizer,
        tokenizer_path=plan.model_path,
        seq_len=plan.batch.seq_len,
        seed=plan.run.seed,
    )
    if start.state is not None:
        require_same_rows(start.state, data.train.fingerprint)
    loader = Loader(data.train, plan.batch, seed=plan.run.seed)
    data = replace(data, train_ledger=replace(data.train_ledger, packs=loader.num_packs))
    callbacks.on_data(data, loader)
    prepared = prepare(plan)
    return _Run(
        plan=plan,
        callbacks=callbacks,
        tokenizer=tokenizer,
        data=data,
        prepared=prepared,
        loader=loader,
        meter=memory_meter(prepared.model.device),
        log=log,
        sinks=sinks,
    )


def _train_and_report(current: _Run, start: Start, began: float) -> RunReport:
    """Whatever happens between the first step and the last, report.json is written and the sinks are closed."""
    report: RunReport | None = None
    try:
        stopped = _train(current, start)
        status = "interrupted" if stopped else "complete"
        report = _finish(current, status, "stopped on request" if stopped else "", began)
        return report
    except FituneError as error:
        report = _finish(current, "failed", error.message, began)
        error.exit_code = TrainingFailed.exit_code  # whatever it is, work was under way
        raise
    finally:
        for sink in current.sinks:
            sink.finish(report)


def _train(current: _Run, start: Start) -> bool:
    """All steps; True when the caller asked to stop before the end."""
    torch.manual_seed(current.plan.run.seed)
    if start.state is not None:
        current.position, current.best_eval_loss = restore(current.prepared, start.state)
    if start.step == 0 and current.samples:
        answer_before(current.directory, current.prepared.model, current.samples, current.callbacks.answer)
    for sink in current.sinks:
        sink.start(current.plan, current.directory.name)
    for report in _steps(current, start.step):
        report = _evaluated(current, report)
        current.log.append(report)
        for sink in current.sinks:
            sink.step(report)
        stopping = current.callbacks.stop_asked() and report.step < report.total_steps
        if stopping or _is_due(report, current.plan.run.save_every):
            _save(current, report)
        if stopping:
            return True
    return False


def _steps(current: _Run, start_step: int) -> Iterator[StepReport]:
    """The loop's reports, with the position in the data kept up to date beside them."""
    reports = train(
        current.plan,
        current.prepared,
        current.loader,
        meter=current.meter,
        start_step=start_step,
        start_at=current.position,
    )
    for report in reports:
        current.position = current.loader.after(current.position)
        yield report


def _evaluated(current: _Run, report: StepReport) -> StepReport:
    """The report with the held-out loss where it is due: every ``eval_every`` steps and at the end."""
    last = report.step == report.total_steps
    if current.data.eval is None or not (last or _is_due(report, current.plan.run.eval_every)):
        return report
    loss = evaluate(current.prepared.model, current.data.eval, current.plan.batch)
    return replace(report, eval_loss=loss)


def _save(current: _Run, report: StepReport) -> None:
    current.log.sync()
    if report.eval_loss is not None:
        current.best_eval_loss = min(current.best_eval_loss, report.eval_loss)
    state = capture(
        current.plan,
        current.prepared,
        step=report.step,
        position=current.position,
        best_eval_loss=current.best_eval_loss,
        rows=current.data.train.fingerprint,
    )
    save_checkpoint(
        current.directory, state, keep=current.plan.run.keep_checkpoints, eval_loss=report.eval_loss
    )


def _finish(current: _Run, status: str, reason: str, began: float) -> RunReport:
    """Export when complete, then write report.json."""
    report = summarise(
        read_metrics(current.log.path),
        current.prepared,
        current.data,
        status=status,
        reason=reason,
        meter_kind=current.meter.kind,
        seconds=time.perf_counter() - began,
    )
    if status == "complete":
        report = replace(report, samples=_samples_after(current))
        report = replace(report, exported=_exported(current, report))
    write_atomically(current.directory / "report.json", to_json(report))
    return report


def _is_due(report: StepReport, every: int) -> bool:
    return every > 0 and report.step % every == 0


def _samples_after(current: _Run) -> tuple[Sample, ...]:
    if not current.samples:
        return ()
    return compare_samples(
        current.directory, current.prepared.model, current.samples, current.callbacks.answer
    )


def _exported(current: _Run, report: RunReport) -> str:
    return str(export_result(current.plan, current.prepared.model, current.tokenizer, report))
