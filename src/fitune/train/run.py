"""One run from a Plan to a RunReport: resume, train, evaluate, save, export. It decides nothing.

Everything a run leaves behind is written here, inside its directory: plan.json, metrics.jsonl, checkpoints/,
the export and report.json.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fitune.checkpoint.commit import Descent
from fitune.data.preparing import contents_of
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import FituneError, OutOfMemory, PeerGone, TrainingFailed
from fitune.measure.communication import waits_measured
from fitune.measure.memory import memory_meter
from fitune.spec.plan import Plan
from fitune.spec.reports import AFTER_TRAINING, Restart, Retry, RunReport, StepReport
from fitune.spec.run_directory import LOGS
from fitune.spec.schedule import is_due
from fitune.track.metrics import MetricsLog, Sink
from fitune.train.beginning import begin_attempt, own_directory, read_data, restart_log, untold
from fitune.train.current import Callbacks, Run
from fitune.train.directory import remove_run, require_own_directory, require_removable
from fitune.train.ending import complete, failed, interrupted, tell_what_is_saved
from fitune.train.evaluate import answer_before, evaluate
from fitune.train.failure import Whereabouts, explain_failure, require_finite_step, shortage_of
from fitune.train.loop import train
from fitune.train.peers import known_to_peers, name_the_cause
from fitune.train.prepare import prepare
from fitune.train.resume import Start, base_identity, require_same_base, restore, where_all_start
from fitune.train.saving import Saver, keep_trained, saving
from fitune.train.spikes import ZeroWatch, jump_words
from fitune.train.together import (
    gathered_weights,
    require_same_on_all,
    require_shared_directory,
    rows_of_ranks,
)
from fitune.train.uploading import Uploads, begin_in_store, sent_beside


def run(
    plan: Plan,
    *,
    callbacks: Callbacks,
    sinks: Sequence[Sink] = (),
    resume: bool | str = False,
    overwrite: bool = False,
    files: Mapping[str, str] | None = None,
    retries: Sequence[Retry] = (),
    restarts: Sequence[Restart] = (),
    ranks: Ranks = ALONE,
) -> RunReport:
    """Execute ``plan`` in its run directory. ``files`` (name -> text) are written beside plan.json.

    ``resume``: True for the newest valid checkpoint (from the start when there is none), or a checkpoint's path or
    URL.
    ``overwrite``: remove an earlier run once the data of this one was read.
    ``retries``: attempts before this one that ran out of memory; the first step and report.json tell of them.
    ``restarts``: how these ranks came to replace lost ones.
    ``ranks``: the processes that run it together, every one of which calls this; the first alone owns the directory,
    writes into it and calls the sinks.
    Raises FituneError; once the data was read, report.json says what happened and how far the run came.
    """
    began = time.perf_counter()
    directory = Path(plan.run.output_dir)
    require_own_directory(plan)
    if overwrite:
        require_removable(directory)
    with ExitStack() as owned:
        owner = ranks.from_first(lambda: own_directory(directory, owned))
        where = Whereabouts()
        runs: list[Run] = []
        on_stall = partial(_report_stall, runs)
        owned.enter_context(known_to_peers(ranks, directory, where, on_stall=on_stall))
        require_shared_directory(ranks, directory, attempt=owner.attempt)
        start = Start(state=None)
        if not overwrite:
            start = where_all_start(directory, plan, ranks=ranks, resume=resume, on_note=callbacks.on_note)
        for note in start.notes:
            callbacks.on_note(note)
        base = base_identity(plan, ranks)
        require_same_base(start, plan, base=base)
        contents = ranks.once_a_node(lambda: contents_of(plan.data, watch=callbacks.on_reading))
        tokenizer, data, loader = ranks.in_turn(lambda: read_data(plan, start, callbacks, ranks, contents))
        require_same_on_all(ranks, plan, rows=data.train.fingerprint, base=base)

        uploads: Uploads | None = None  # the first rank's alone

        def begin() -> Descent:
            nonlocal uploads
            if overwrite:  # only now: what was there is untouched until the data is known
                remove_run(directory)
            was_there = any((directory / name).exists() for name in ("plan.json", "recipe.yaml"))
            descent = begin_attempt(
                plan, start, files or {}, attempt=owner.attempt, on_note=callbacks.on_note
            )
            try:
                uploads = begin_in_store(plan.run, descent.line, callbacks.on_note, overwrite=overwrite)
            except FituneError:
                if not was_there:  # nothing was trained: a run that never began leaves nothing
                    remove_run(directory)
                raise
            return descent

        descent = ranks.from_first(begin)
        owned.enter_context(sent_beside(uploads))
        current = Run(
            plan=plan, callbacks=callbacks, ranks=ranks, tokenizer=tokenizer, data=data, loader=loader, log=None,
            sinks=sinks, base=base, descent=descent, began=began, steps_of_other_plan=start.steps_of_other_plan,
            where=where, uploads=uploads,
        )  # fmt: skip
        if not ranks.is_alone:
            current.waits = owned.enter_context(waits_measured())
        runs.append(current)
        if ranks.is_first:
            current.log = owned.enter_context(MetricsLog(directory / "metrics.jsonl"))
            restart_log(current.log, start, callbacks.on_note)
            current.retries, current.restarts = untold(retries, restarts, current.log)
        return _train_and_report(current, start)


def _train_and_report(current: Run, start: Start) -> RunReport:
    """Trains; report.json is written and the sinks are closed whatever happens."""
    report: RunReport | None = None
    try:
        stopped = _train(current, start)
        current.where.doing = "finishing"  # the first rank exports for as long as it takes
        current.rows = rows_of_ranks(current)
        weights = None if stopped else gathered_weights(current)
        if weights is not None and not current.ranks.is_first:
            weights.follow()
        report = current.ranks.from_first(
            lambda: interrupted(current, "stopped on request") if stopped else complete(current, weights)
        )
        return report
    except (KeyboardInterrupt, SystemExit):  # SystemExit: a signal, by the handler of the program
        report = interrupted(current, f"stopped at once ({current.where})")
        raise
    except Exception as error:  # the one place that catches all: it is written down and raised again
        explained = explain_failure(error, current.plan, current.where, rank=current.ranks.rank)
        if isinstance(explained, PeerGone):
            name_the_cause(explained, current.directory / LOGS)
        if isinstance(explained, OutOfMemory):
            explained.shortage = shortage_of(error, current.where, meter=current.meter)
        if current.where.doing in ("finishing", *AFTER_TRAINING):
            keep_trained(current, error)
        tell_what_is_saved(current, explained)
        report = failed(current, explained, error)
        if explained is error:
            raise
        raise explained from error
    finally:
        for sink in current.sinks:
            sink.finish(report)


def _report_stall(runs: Sequence[Run], error: TrainingFailed) -> None:
    """report.json of a run that hangs, from another thread than its own."""
    for current in runs:
        if current.ranks.is_first:
            failed(current, error, error)


def _train(current: Run, start: Start) -> bool:
    """Load the model and do all steps; True when the caller asked to stop before the end."""
    current.callbacks.on_data(current.data, current.loader, current.steps_of_other_plan)
    current.where.doing = "loading the model"
    current.prepared = prepare(current.plan, ranks=current.ranks, on_bytes=current.callbacks.on_bytes)
    current.meter = memory_meter(current.model.device)
    torch.manual_seed(current.plan.run.seed + current.ranks.rank)
    if start.state is not None and start.facts is not None:
        current.position, current.best_eval_loss = restore(
            current.loaded, start.state, start.facts, ranks=current.ranks
        )
    if start.step == 0 and current.samples:
        current.where.doing = "answering samples"
        answer_before(current.directory, current.model, current.samples, current.callbacks.answer)
    for sink in current.sinks:
        sink.start(current.plan, current.plan.run.name)
    with saving(current) as saver:
        stopped = _do_steps(current, saver, start.step)
    if not stopped:
        require_finite_step(current.where.step, current.loaded.engine.trained(), ranks=current.ranks)
    return stopped


def _do_steps(current: Run, saver: Saver, start_step: int) -> bool:
    """Do all steps from ``start_step`` on; True when the caller asked to stop before the end."""
    zeros = ZeroWatch()
    for report in _steps(current, start_step):
        began_at = time.time() - report.step_seconds
        restarts = tuple(replace(one, again_at=one.again_at or began_at) for one in current.restarts)
        report, is_best = _evaluated(current, replace(report, retries=current.retries, restarts=restarts))
        if current.log is not None:
            current.log.append(report)
        current.retries, current.restarts = (), ()
        if report.jumped_rows:
            current.callbacks.on_note(jump_words(report.step, report.loss, report.jumped_rows))
        if warning := zeros.words(step=report.step, loss=report.loss, grad_norm=report.grad_norm):
            current.callbacks.on_note(warning)
        for sink in current.sinks:
            sink.step(report)
        asked, failed = current.ranks.summed([current.callbacks.stop_asked(), saver.has_failed])
        if failed:
            saver.wait()
        stopping = asked > 0 and report.step < report.total_steps
        if stopping or _is_save_due(current, report, is_best=is_best):
            saver.save(report)
        if stopping:
            return True
    return False


def _steps(current: Run, start_step: int) -> Iterator[StepReport]:
    """The loop's reports, with the position in the data kept up to date beside them."""
    reports = train(
        current.plan,
        current.loaded,
        current.loader,
        meter=current.meter,
        ranks=current.ranks,
        start_step=start_step,
        start_at=current.position,
        where=current.where,
        waits=current.waits,
    )
    for report in reports:
        current.position = current.loader.after(current.position)
        if not current.ranks.is_alone:
            current.done.append(report)
        yield report


def _evaluated(current: Run, report: StepReport) -> tuple[StepReport, bool]:
    """The report with the held-out loss where it is due, and at the end, and whether it is the best so far."""
    last, run = report.step == report.total_steps, current.plan.run
    due = last or _is_due(current, report, every=run.eval_every, per_epoch=run.evals_per_epoch)
    if current.data.eval is None or not due:
        return report, False
    current.where.doing = "evaluating"
    loss = evaluate(
        current.model, current.data.eval, current.plan.batch, ranks=current.ranks, on_batch=current.where.sign
    )
    current.loaded.engine.rest()
    is_best = loss < current.best_eval_loss
    current.best_eval_loss = min(current.best_eval_loss, loss)
    return replace(report, eval_loss=loss), is_best


def _is_save_due(current: Run, report: StepReport, *, is_best: bool) -> bool:
    """True as often as the plan says, at the end, so that the run may be made longer, and at the best evaluation."""
    run = current.plan.run
    due = _is_due(current, report, every=run.save_every, per_epoch=run.saves_per_epoch)
    return run.saves and (due or report.step == report.total_steps or is_best)


def _is_due(current: Run, report: StepReport, *, every: int, per_epoch: int) -> bool:
    steps = current.loader.steps_per_epoch
    return is_due(report.step, every=every, per_epoch=per_epoch, steps_per_epoch=steps)
