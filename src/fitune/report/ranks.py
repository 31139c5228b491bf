"""Time of each of several processes, and steps that took much longer than the others."""

import statistics
from collections.abc import Sequence

from fitune.spec.reports import RankReport, RunReport, StepReport, settled_steps
from fitune.units import format_bytes, format_percent, format_rate, format_seconds

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
