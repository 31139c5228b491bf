"""A run in words: how far it is, who runs it, attempts that ran out of memory, ranks that were replaced or slow."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fitune.errors import Shortage
from fitune.report.page import Tile
from fitune.units import counted, format_bytes, format_percent, format_rate, format_seconds
from fitune.values.rank_status import RankStatus
from fitune.values.reports import RankReport, Restart, Retry, RunReport, StepReport, settled_steps
from fitune.values.run_lock import Owner

SIGN_HEADINGS = ("", "where", "was doing", "in step", "last sign")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A run as its directory shows it at one moment."""

    at: float
    """``time.time`` of this look."""
    owners: tuple[Owner, ...]
    last_sign_s: float
    """Seconds since any file that tells of progress was written."""
    step: int = 0
    total_steps: int = 0
    remaining_s: float = 0.0
    """Seconds that the steps left will take; 0 before the first."""
    saved_step: int | None = None
    """Step of the last checkpoint."""
    signs: tuple[tuple[RankStatus, float], ...] = ()
    """The status of each rank of a run of several, and the seconds since its last sign, which a rank that makes
    progress gives every ten seconds."""

    @property
    def is_alive(self) -> bool:
        """True while any process that owns the run lives."""
        return any(owner.is_alive for owner in self.owners)

    @property
    def since(self) -> float:
        """``time.time`` when the present attempt began."""
        return min((owner.since for owner in self.owners), default=self.at)


def state_line(run: UnderWay) -> str:
    """One sentence: since when the run goes on and how far it is, or that its process is gone."""
    saved = "no checkpoint yet" if run.saved_step is None else f"last checkpoint at step {run.saved_step:,}"
    done = f"step {run.step:,} of {run.total_steps:,}" if run.step else "no step is done yet"
    if run.is_alive:
        left = f", {format_seconds(run.remaining_s)} left" if run.remaining_s else ""
        since = f"running since {clock(run.since, at=run.at)} ({format_seconds(run.at - run.since)})"
        return f"{since}: {done}{left}; {saved}; last sign {_ago(run.last_sign_s)}"
    goes_on = "; fitune train … --resume goes on" if run.saved_step is not None else ""
    if not run.owners:
        return f"nobody runs it, and it wrote no report: {done}; {saved}{goes_on}"
    gone = " and ".join(owner.name for owner in run.owners)
    verb = "are" if len(run.owners) > 1 else "is"
    return f"no sign for {format_seconds(run.last_sign_s)}; {gone} {verb} gone: {done}; {saved}{goes_on}"


def sign_rows(signs: Sequence[tuple[RankStatus, float]]) -> list[tuple[str, ...]]:
    """A row for each rank: its process, what it did last, in which step, and how long ago."""
    return [
        (
            f"rank {status.rank}",
            f"process {status.pid} on {status.host}",
            _doing(status),
            f"{status.step:,}",
            _ago(seconds),
        )
        for status, seconds in signs
    ]


def _doing(status: RankStatus) -> str:
    if status.error is not None:
        return status.loss() if status.error.is_by_another else f"failed: {status.error.message}"
    if status.is_gone:
        return f"{status.doing}; its process is gone"
    return f"{status.doing}; stands still" if status.stalled else status.doing


def under_way_tiles(run: UnderWay, restarts: Sequence[Restart]) -> Iterator[Tile]:
    """The figures that only a run under way has."""
    if run.is_alive:
        yield Tile("Running for", format_seconds(run.at - run.since), f"since {clock(run.since, at=run.at)}")
        left = format_seconds(run.remaining_s) if run.remaining_s else "–"
        yield Tile("Time left", left, "as the last steps go" if run.remaining_s else "known after a step")
    if run.saved_step is None:
        yield Tile("Last checkpoint", "none", "")
    else:
        lost = max(run.step - run.saved_step, 0)
        yield Tile("Last checkpoint", f"step {run.saved_step:,}", f"{counted(lost, 'step')} after it")
    yield Tile("Last sign", _ago(run.last_sign_s), f"at {clock(run.at - run.last_sign_s, at=run.at)}")
    if run.signs:
        hosts = len({status.host for status, _ in run.signs})
        again = f", {counted(len(restarts), 'restart')}" if restarts else ""
        yield Tile("Workers", f"{len(run.signs)}", f"on {counted(hosts, 'machine')}{again}")


def restart_summary(restarts: Sequence[Restart]) -> str:
    """``2 restarts, 41 s lost and 7 steps done again; workers: 4 → 3 → 4``."""
    lost = sum(one.lost_seconds for one in restarts if one.again_at)
    steps = sum(one.lost_steps for one in restarts)
    again = f" and {counted(steps, 'step')} done again" if steps else ""
    workers = [restarts[0].workers_before, *(one.workers for one in restarts)]
    changed = f"; workers: {' → '.join(map(str, workers))}" if len(set(workers)) > 1 else ""
    return f"{counted(len(restarts), 'restart')}, {format_seconds(lost)} lost{again}{changed}"


def clock(moment: float, *, at: float) -> str:
    """The local time of ``moment``, with the day where that is another one than ``at``'s."""
    then, now = time.localtime(moment), time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)


def _ago(seconds: float) -> str:
    return "just now" if seconds < 1 else f"{seconds:,.0f} s ago"


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
    again = f", {counted(restart.lost_steps, 'step')} done again" if restart.lost_steps else ""
    return f"{restart.cause}; {workers} went on {where}{again}{lost}"


def begins(retry: Retry) -> str:
    """Start of the next attempt in words: ``goes on from step 40`` or ``begins anew``."""
    return f"goes on from step {retry.after_step:,}" if retry.after_step else "begins anew"


_LONG_FACTOR, _LONG_SECONDS = 10.0, 1.0
"""A step is told of when it took so many times the median, and so long: saves and first steps are less."""


RANK_HEADINGS = ("", "peak", "a step", "busy", "in collectives", "busiest")


def rank_rows(ranks: Sequence[RankReport]) -> list[tuple[str, ...]]:
    """Means of each rank: a step, of it busy and in collectives, with the longest busy time and its step."""
    return [
        (
            f"rank {rank.rank}",
            format_bytes(rank.peak_bytes),
            format_seconds(rank.step_seconds),
            f"{format_seconds(rank.busy_seconds)} ({format_percent(rank.busy_seconds / rank.step_seconds)})",
            format_seconds(rank.waiting_seconds),
            f"{format_seconds(rank.busiest_seconds)} in step {rank.busiest_step}",
        )
        for rank in ranks
        if rank.waiting_seconds is not None and rank.busy_seconds is not None and rank.step_seconds
    ]


def long_steps(steps: Sequence[StepReport], run: RunReport | None) -> list[str]:
    """A sentence for each step that took much longer than the others, with the throughput without all of them.

    A process that was stopped for a while, or a disk or a machine that is slow, is seen here.
    """
    kind = None if run is None or run.memory is None else run.memory.kind
    settled = settled_steps(steps, kind=kind)
    if len(settled) < 3:
        return []
    median = statistics.median(step.step_seconds for step in settled)
    limit = max(_LONG_FACTOR * median, _LONG_SECONDS)
    long = [step for step in settled if step.step_seconds > limit]
    rest = [step for step in settled if step.step_seconds <= limit]
    if not long:
        return []
    seconds = sum(step.step_seconds for step in rest)
    rate = format_rate(sum(step.tokens for step in rest) / seconds)
    sentences = [
        f"step {step.step} took {format_seconds(step.step_seconds)}, and the median is {format_seconds(median)}"
        f"{_whose(step, () if run is None else run.ranks)}"
        for step in long
    ]
    return [*sentences, f"throughput holds {'it' if len(long) == 1 else 'them'}; without, it is {rate}"]


def _whose(step: StepReport, ranks: Sequence[RankReport]) -> str:
    slow = [
        rank.rank
        for rank in ranks
        if rank.busiest_step == step.step and rank.busiest_seconds > step.step_seconds / 2
    ]
    return (
        f": rank {slow[0]} was slow, and the others waited for it"
        if len(slow) == 1 and len(ranks) > 1
        else ""
    )
