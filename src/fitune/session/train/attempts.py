"""Attempts at a run: one that ran out of memory in a step is followed by one that takes less."""

from dataclasses import dataclass, replace
from pathlib import Path

from fitune.checkpoint.commit import Commit, last_saved
from fitune.engine.ranks import Ranks
from fitune.errors import OutOfMemory, Shortage
from fitune.estimate.predict import predict
from fitune.files import write_atomically
from fitune.planner.retry import describe_size, next_to_try, smaller_plan, why_no_smaller
from fitune.report.attempts import shortage_words
from fitune.session.events import RanOutOfMemory, Tell
from fitune.spec.plan import Plan
from fitune.spec.predictions import Phase, PlanReport, Priced
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.reports import Restart, Retry
from fitune.spec.run_directory import SHORTAGE
from fitune.spec.serial import from_data, read_json, to_json
from fitune.units import format_bytes

IN_A_STEP = (*(phase.value for phase in Phase), "evaluating")
"""Phases in which the micro-batch decides about memory; loading, answering and exporting know none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a run."""

    report: PlanReport
    resume: bool | str
    overwrite: bool
    retries: tuple[Retry, ...] = ()
    """Attempts before it that ran out of memory."""
    restarts: tuple[Restart, ...] = ()
    """Why its ranks are not the first ones."""

    @property
    def plan(self) -> Plan:
        return self.report.chosen.plan


def next_attempt(
    failed: Attempt, recipe: Recipe, error: OutOfMemory, *, had: Commit | None, tell: Tell
) -> Attempt:
    """Tells of one that takes less, and returns it. It begins at the last checkpoint; ``had`` is the last one before
    the attempt that failed.

    Raises OutOfMemory with what was predicted, what was measured and what to try when there is no such attempt.
    """
    shortage = error.shortage
    if shortage is None or shortage.doing not in IN_A_STEP:
        raise error
    plan = smaller_plan(failed.plan, recipe, shortage)
    if plan is None:
        raise _nothing_smaller(error, shortage, failed.plan, recipe)
    saved = last_saved(Path(plan.run.output_dir))
    following = _next(failed, plan, error, shortage, has_saved=saved is not None and saved != had)
    tell(RanOutOfMemory(retry=following.retries[-1]))
    return following


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankShortage:
    """One rank of several ran out of memory: the others wait in vain, so the job ends and its launcher decides."""

    message: str
    shortage: Shortage | None


def leave_shortage(plan: Plan, error: OutOfMemory, ranks: Ranks) -> None:
    """Write down for the launcher that memory ran out on this rank, and what was known then."""
    left = _RankShortage(message=f"rank {ranks.rank}: {error.message}", shortage=error.shortage)
    write_atomically(Path(plan.run.output_dir) / SHORTAGE, to_json(left))


def shortage_of_ranks(directory: Path) -> OutOfMemory | None:
    """The error of the rank whose memory ran out; None when none did."""
    file = directory / SHORTAGE
    if not file.is_file():
        return None
    left = from_data(_RankShortage, read_json(file))
    return OutOfMemory(left.message, shortage=left.shortage)


def _newest_step(plan: Plan) -> int:
    """Step of the last checkpoint in the run's directory, 0 without any."""
    saved = last_saved(Path(plan.run.output_dir))
    return 0 if saved is None else saved.step


def _next(
    attempt: Attempt, plan: Plan, error: OutOfMemory, shortage: Shortage, *, has_saved: bool
) -> Attempt:
    """The next attempt, from the last checkpoint of this run, else from where the failed attempt began."""
    elsewhere = isinstance(attempt.resume, str) and not attempt.overwrite
    resume = attempt.resume if elsewhere and not has_saved else True
    retry = Retry(
        attempt=len(attempt.retries) + 1,
        reason=error.message.partition("\n")[0],
        shortage=shortage,
        before=describe_size(attempt.plan),
        after=describe_size(plan),
        predicted_bytes=predict(attempt.plan).memory.tensor_peak_bytes,
        predicted_after_bytes=predict(plan).memory.tensor_peak_bytes,
        after_step=_newest_step(plan),
    )
    words = f"{retry.after} instead of {retry.before}: attempt {retry.attempt} ran out of memory"
    report = replace(
        attempt.report,
        chosen=Priced(plan=plan, estimate=predict(plan)),
        decisions=(*attempt.report.decisions, words),
    )
    return replace(attempt, report=report, resume=resume, overwrite=False, retries=(*attempt.retries, retry))


def _nothing_smaller(error: OutOfMemory, shortage: Shortage, plan: Plan, recipe: Recipe) -> OutOfMemory:
    """The error with predicted and measured bytes side by side, and the changes that are left to try."""
    predicted = predict(plan).memory.tensor_peak_bytes
    changes = next_to_try(plan, recipe, shortage)
    hints = [f"{change.words} ({format_bytes(change.peak_bytes)} predicted)" for change in changes]
    lines = [
        error.message,
        f"  {shortage_words(shortage, predicted_bytes=predicted)}",
        f"  no smaller micro-batch: {why_no_smaller(plan, shortage)}",
    ]
    saved = _newest_step(plan)
    going_on = f"; --resume goes on from step-{saved}" if saved else ""
    hint = ("; or ".join(hints) or "a device with more memory, or a smaller model") + going_on
    return OutOfMemory("\n".join(lines), hint=hint, shortage=shortage)
