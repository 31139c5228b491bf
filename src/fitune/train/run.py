"""One run from a Plan to a RunReport: resume, train, evaluate, save, export. It decides nothing.

Everything a run leaves behind is written here, inside its directory: plan.json, metrics.jsonl, checkpoints/,
the export and report.json.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from fitune.checkpoint.commit import FOLDER as CHECKPOINTS
from fitune.checkpoint.commit import Descent
from fitune.checkpoint.resume import begin_line
from fitune.data.loader import Loader
from fitune.data.making import PreparedData
from fitune.data.preparing import Contents, contents_of, prepare_data
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import FituneError, OutOfMemory, PeerGone, TrainingFailed
from fitune.files import remove_stale_siblings, write_atomically
from fitune.measure.communication import waits_measured
from fitune.measure.memory import memory_meter
from fitune.models.tokens import planned_tokenizer, require_rows
from fitune.track.metrics import MetricsLog, Sink, read_metrics, steps_in
from fitune.train.current import Callbacks, Run
from fitune.train.directory import remove_run, require_own_directory, require_removable
from fitune.train.ending import complete, explain_what_is_saved, failed, interrupted
from fitune.train.evaluate import answer_before
from fitune.train.failure import TRACEBACK, Whereabouts, explain_failure, require_finite_step, shortage_of
from fitune.train.held_out import (
    evaluated,
    held_out_loss,
    is_evaluated_after,
    make_owed_evaluation,
    owed_evaluation,
)
from fitune.train.loop import WATCHED_STEPS, StepWatch, row_words, train
from fitune.train.peers import (
    gathered_weights,
    known_to_peers,
    name_the_cause,
    require_same_on_all,
    require_shared_directory,
    rows_of_ranks,
)
from fitune.train.prepare import prepare
from fitune.train.saving import keep_trained, restore, saving
from fitune.train.start import (
    Start,
    base_identity,
    require_same_base,
    require_same_rows,
    where_all_start,
    where_to_start,
)
from fitune.train.uploading import Uploads, begin_in_store
from fitune.values.plan import Plan
from fitune.values.rank_status import forget_statuses
from fitune.values.reports import AFTER_TRAINING, Restart, Retry, RunReport
from fitune.values.run_directory import LOGS, placed
from fitune.values.run_lock import lock_directory
from fitune.values.serial import to_json


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
    with ExitStack() as owned:
        current, start = _begun(
            plan, callbacks, sinks, owned, resume=resume, overwrite=overwrite, files=files or {}, ranks=ranks
        )
        if current.log is not None:
            current.retries, current.restarts = not_yet_logged(retries, restarts, current.log)
        report: RunReport | None = None
        try:
            stopped = _train(current, start)
            current.where.doing = "finishing"  # the first rank exports for as long as it takes
            current.rows = rows_of_ranks(current)
            weights = None if stopped else gathered_weights(current)
            if weights is not None and not ranks.is_first:
                weights.follow()
            report = ranks.from_first(
                lambda: interrupted(current, "stopped on request") if stopped else complete(current, weights)
            )
            return report
        except (KeyboardInterrupt, SystemExit):  # SystemExit: a signal, by the handler of the program
            report = interrupted(current, f"stopped at once ({current.where})")
            raise
        except Exception as error:  # the one place that catches all: it is written down and raised again
            explained = explain_failure(error, plan, current.where, rank=ranks.rank)
            if isinstance(explained, PeerGone):
                name_the_cause(explained, current.directory / LOGS)
            if isinstance(explained, OutOfMemory):
                explained.shortage = shortage_of(error, current.where, meter=current.meter)
            if current.where.doing in ("finishing", *AFTER_TRAINING):
                keep_trained(current, error)
            explain_what_is_saved(current, explained)
            report = failed(current, explained, error)
            if explained is error:
                raise
            raise explained from error
        finally:
            for sink in sinks:
                sink.finish(report)


def _begun(
    plan: Plan, callbacks: Callbacks, sinks: Sequence[Sink], owned: ExitStack, *, resume: bool | str, overwrite: bool,
    files: Mapping[str, str], ranks: Ranks,
) -> tuple[Run, Start]:  # fmt: skip
    """Everything before the first step but the model: the directory is locked, the place to start from is found, the
    data is read, the log is put back."""
    began = time.perf_counter()
    directory = Path(plan.run.output_dir)
    require_own_directory(plan)
    if overwrite:
        require_removable(directory)
    where, runs = Whereabouts(), list[Run]()

    def own_directory() -> str:
        """Lock it and remove what killed runs left: half-written files, and what their ranks said last."""
        attempt = owned.enter_context(lock_directory(directory))
        remove_stale_siblings(directory)
        forget_statuses(directory / LOGS)
        return attempt

    def on_stall(error: TrainingFailed) -> None:
        """report.json of a run that hangs, from another thread than its own."""
        if runs and ranks.is_first:
            failed(runs[0], error, error)

    attempt = ranks.from_first(own_directory)
    owned.enter_context(known_to_peers(ranks, directory, where, on_stall=on_stall))
    require_shared_directory(ranks, directory, attempt=attempt)
    start = Start(state=None)
    if not overwrite:
        start = where_all_start(directory, plan, ranks=ranks, resume=resume, on_note=callbacks.on_note)
    for note in start.notes:
        callbacks.on_note(note)
    base = base_identity(plan, ranks)
    require_same_base(start, plan, base=base)
    contents = ranks.once_a_node(lambda: contents_of(plan.data, watch=callbacks.on_reading))
    tokenizer, data, loader = ranks.in_turn(lambda: _read_data(plan, start, callbacks, ranks, contents))
    require_same_on_all(ranks, plan, rows=data.train.fingerprint, base=base)

    uploads: Uploads | None = None  # the first rank's alone

    def begin() -> Descent:
        """The line of checkpoints that this attempt goes on."""
        nonlocal uploads
        descent, uploads = _make_directory(
            plan, start, attempt=attempt, files=files, overwrite=overwrite, on_note=callbacks.on_note
        )
        return descent

    descent = ranks.from_first(begin)
    if uploads is not None:
        owned.enter_context(uploads)
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
        _restart_log(current.log, start, callbacks.on_note)
        earlier = read_metrics(current.log.path)
        current.began -= sum(step.step_seconds + step.data_seconds for step in earlier)
    return current, start


def _make_directory(
    plan: Plan, start: Start, *, attempt: str, files: Mapping[str, str], overwrite: bool, on_note: Callable[[str], None]
) -> tuple[Descent, Uploads | None]:  # fmt: skip
    """Make the directory this attempt's; what an earlier one said about its end holds no longer."""
    directory = Path(plan.run.output_dir)
    if overwrite:  # only now: what was there is untouched until the data is known
        remove_run(directory)
    was_there = any((directory / name).exists() for name in ("plan.json", "recipe.yaml"))
    for name in ("report.json", "report.html", TRACEBACK):
        (directory / name).unlink(missing_ok=True)
    for name, text in {"plan.json": to_json(placed(plan)), **files}.items():
        write_atomically(directory / name, text)
    if plan.run.upload_to:
        (directory / CHECKPOINTS).mkdir(exist_ok=True)  # the line is written there, also before a save
    descent = begin_line(directory, attempt=attempt, base=start.path, damaged=start.damaged, on_note=on_note)
    try:
        return descent, begin_in_store(plan.run, descent.line, on_note, overwrite=overwrite)
    except FituneError:
        if not was_there:  # nothing was trained: a run that never began leaves nothing
            remove_run(directory)
        raise


def _read_data(
    plan: Plan, start: Start, callbacks: Callbacks, ranks: Ranks, contents: Contents
) -> tuple[PreTrainedTokenizerBase, PreparedData, Loader]:
    """Tokenise before the model is loaded: bad data should not cost the wait for the weights."""
    tokenizer = planned_tokenizer(plan)
    data = prepare_data(
        plan.data,
        tokenizer=tokenizer,
        tokenizer_path=plan.model_path,
        seq_len=plan.batch.seq_len,
        seed=plan.run.seed,
        contents=contents,
        watch=callbacks.on_reading,
        on_note=callbacks.on_note,
        sends=ranks.is_first,
    )
    largest = max(part.largest_id for part in (data.train, data.eval) if part is not None)
    require_rows(plan.model_path, largest_id=largest, rows=plan.model.vocab_size)
    require_same_rows(start, data.train.fingerprint)
    loader = Loader(data.train, plan.batch, seed=plan.run.seed, rank=ranks.rank, world_size=ranks.world)
    return (
        tokenizer,
        replace(data, train_ledger=replace(data.train_ledger, packs=loader.num_packs)),
        loader,
    )


def _train(current: Run, start: Start) -> bool:
    """Load the model and do all steps; True when the caller asked to stop before the end."""
    current.callbacks.on_data(current.data, current.loader, current.steps_of_other_plan)
    current.where.doing = "loading the model"
    current.prepared = prepare(current.plan, ranks=current.ranks, on_bytes=current.callbacks.on_bytes)
    current.meter = memory_meter(current.model.device)
    torch.manual_seed(current.plan.run.seed + current.ranks.rank)
    if start.state is not None and start.facts is not None:
        restore(current, start.state, start.facts)
    if start.step == 0 and current.samples:
        current.where.doing = "answering samples"
        answer_before(current.directory, current.model, current.samples, current.callbacks.answer)
    before = held_out_loss(current, may_stop=False) if start.step == 0 else None
    for sink in current.sinks:
        sink.start(current.plan, current.plan.run.name)
    earlier = [] if start.state is None else steps_in(start.state.log, last=WATCHED_STEPS)
    watch = StepWatch(current.plan.schedule.max_grad_norm, earlier)
    reports = train(
        current.plan, current.loaded, current.loader, meter=current.meter, ranks=current.ranks, start_step=start.step,
        start_at=current.position, earlier=earlier, where=current.where, waits=current.waits,
    )  # fmt: skip
    with saving(current) as saver:
        owed = owed_evaluation(current, start)
        if owed is not None and not make_owed_evaluation(current, owed, saver):
            return True
        for report in reports:
            current.position = current.loader.after(current.position)
            if not current.ranks.is_alone:
                current.done.append(report)
            began_at = time.time() - report.step_seconds
            restarts = tuple(replace(one, again_at=one.again_at or began_at) for one in current.restarts)
            report = replace(report, eval_loss_before=before, retries=current.retries, restarts=restarts)
            is_evaluated = is_evaluated_after(current, report, current.plan.run)
            report, is_best = evaluated(current, report) if is_evaluated else (report, False)
            before = None
            if current.log is not None:
                current.log.append(report)
            current.retries, current.restarts = (), ()
            if report.jumped_rows:
                current.callbacks.on_note(
                    f"step {report.step}: the loss jumped to {report.loss:.3f}; training goes on. "
                    f"{row_words(report.jumped_rows)}"
                )
            for warning in watch.warnings(step=report.step, loss=report.loss, grad_norm=report.grad_norm):
                current.callbacks.on_note(warning)
            for sink in current.sinks:
                sink.step(report)
            asked, save_failed = current.ranks.summed(
                [current.callbacks.stop_asked(), saver.problem is not None]
            )
            if save_failed:
                saver.wait()
            is_last = report.step == report.total_steps
            is_owed = is_evaluated and report.eval_loss is None
            stopping = is_owed or (asked > 0 and not is_last)
            run = current.plan.run
            is_due = current.is_due(report, every=run.save_every, per_epoch=run.saves_per_epoch)
            # at the end too, so that the run may be made longer, and at the best evaluation
            if stopping or (run.saves and (is_due or is_last or is_best)):
                saver.save(report)
            if stopping:
                return True
    require_finite_step(current.where.step, current.loaded.engine.trained(), ranks=current.ranks)
    return False


def put_metrics_back(directory: Path, plan: Plan, *, steps: int, on_note: Callable[[str], None]) -> None:
    """Make metrics.jsonl of a complete run of ``steps`` what its last checkpoint says, if that can be used."""
    start = where_to_start(directory, plan, resume=True)
    if start.step == steps:
        with MetricsLog(directory / "metrics.jsonl") as log:
            _restart_log(log, start, on_note)


def _restart_log(log: MetricsLog, start: Start, on_note: Callable[[str], None]) -> None:
    saved = b"" if start.state is None else start.state.log
    if log.restart(saved, step=start.step):
        on_note(
            f"{log.path}: was changed or cut; the lines up to step {start.step} are put back from its checkpoint"
        )


def not_yet_logged(
    retries: Sequence[Retry], restarts: Sequence[Restart], log: MetricsLog
) -> tuple[tuple[Retry, ...], tuple[Restart, ...]]:
    """The retries and restarts that no step of the log tells of yet."""
    steps = list(read_metrics(log.path))
    told = {retry for step in steps for retry in step.retries}
    known = {replace(restart, again_at=0.0) for step in steps for restart in step.restarts}
    return tuple(one for one in retries if one not in told), tuple(
        one for one in restarts if replace(one, again_at=0.0) not in known
    )
