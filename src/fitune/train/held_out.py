"""Evaluations of a run on its held-out rows: when one is due, and the one that a stop left to the run that goes on."""

import time
from contextlib import suppress
from dataclasses import replace

from fitune.checkpoint.commit import FOLDER as CHECKPOINTS
from fitune.track.metrics import steps_in
from fitune.train.current import Run
from fitune.train.evaluate import evaluate
from fitune.train.saving import Saver
from fitune.train.start import Start
from fitune.values.plan import RunPlan
from fitune.values.reports import StepReport


def is_evaluated_after(current: Run, report: StepReport, run: RunPlan) -> bool:
    """True if an evaluation is due after the step, by ``run``: at the end always."""
    is_last = report.step == report.total_steps
    due = is_last or current.is_due(report, every=run.eval_every, per_epoch=run.evals_per_epoch)
    return due and current.data.eval is not None


def owed_evaluation(current: Run, start: Start) -> StepReport | None:
    """The step that a stop saved before its evaluation was done; None where the checkpoint lacks none."""
    if start.state is None or start.facts is None:
        return None
    for report in steps_in(start.state.log, last=1):
        if report.eval_loss is None and is_evaluated_after(current, report, start.facts.plan.run):
            return report
    return None


def make_owed_evaluation(current: Run, owed: StepReport, saver: Saver) -> bool:
    """Make the evaluation of a step that is done and saved, and write it down; False when asked to stop again."""
    current.where.step = owed.step
    current.restarts = tuple(replace(one, again_at=one.again_at or time.time()) for one in current.restarts)
    folder = current.directory / CHECKPOINTS / f"step-{owed.step}"
    if not current.ranks.from_first(folder.is_dir):
        saver.save(owed)  # it was saved in another directory
    report, _ = evaluated(current, owed)
    if report.eval_loss is None:
        return False
    if current.log is not None:
        current.log.replace_last(report)
    for sink in current.sinks:
        sink.step(report)
    saver.add_evaluation(folder, report.eval_loss)
    return True


def evaluated(current: Run, report: StepReport) -> tuple[StepReport, bool]:
    """The report with the held-out loss, and True if it is the best so far; unchanged when asked to stop meanwhile."""
    loss = held_out_loss(current)
    if loss is None:
        return report, False
    is_best = loss < current.best_eval_loss
    current.best_eval_loss = min(current.best_eval_loss, loss)
    return replace(report, eval_loss=loss), is_best


class _StopAsked(Exception):
    """Ends an evaluation on every rank."""


def held_out_loss(current: Run, *, may_stop: bool = True) -> float | None:
    """Nats per supervised token of the held-out rows; None where there are none, or when asked to stop meanwhile."""
    if current.data.eval is None:
        return None
    current.where.doing = "evaluating"
    engine, loss = current.loaded.engine, None

    def on_batch() -> None:
        """A sign of life. Raises _StopAsked when a rank is asked to stop: what was trained is saved before anything."""
        current.where.sign()
        if may_stop and any(current.ranks.summed([current.callbacks.stop_asked()])):
            raise _StopAsked

    with suppress(_StopAsked):
        loss = evaluate(
            engine.model, current.data.eval, current.plan.batch, ranks=current.ranks, on_batch=on_batch
        )
    engine.rest()
    return loss
