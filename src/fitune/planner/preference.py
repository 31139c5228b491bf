"""Which of the plans that fit is taken: the fastest, unless a simpler one is nearly as fast."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fitune.estimate.memory import memory_of
from fitune.estimate.step import StepStages
from fitune.estimate.time import step_time_of
from fitune.planner.placements import Placement
from fitune.spec.plan import Plan

INDISTINGUISHABLE = 0.99
"""Share of the best speed from which on no estimate tells two plans apart."""
SIMPLER_IS_WORTH = 0.95
"""Share of the best speed at which a placement with fewer moving parts is taken in its place."""
STAYING_IS_WORTH = 0.80
"""Share of the best speed at which a plan that offloads nothing is taken in place of one that does: the gain hangs on
links and copies that others use too."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits, the fastest of its placement and batch."""

    step: StepStages
    placement: Placement
    tokens_per_second: float

    @property
    def plan(self) -> Plan:
        return self.step.plan


def tokens_per_second(step: StepStages) -> float:
    """Of all devices together."""
    tokens = step.shape.tokens * step.plan.batch.accumulation * step.plan.hardware.num_gpus
    return tokens / step_time_of(step).step_seconds


def in_order(found: Sequence[Found], *, packed: bool) -> list[Found]:
    """First the one to take: of those nearly as fast as the best one that offloads nothing, then the simplest
    placement, and of its plans that no estimate tells apart the one with least memory when rows are packed, else
    with most rows at once.

    Rows that are not packed are mostly shorter than seq_len: more of them keep the device busy.
    """
    if not found:
        return []
    best = max(item.tokens_per_second for item in found)
    staying = [
        item
        for item in found
        if item.placement.is_plain and item.tokens_per_second >= STAYING_IS_WORTH * best
    ]
    candidates = staying or found
    best = max(item.tokens_per_second for item in candidates)
    fast = [item for item in candidates if item.tokens_per_second >= SIMPLER_IS_WORTH * best]
    simplest = min(item.placement.complexity for item in fast)
    simple = [item for item in fast if item.placement.complexity == simplest]
    enough = INDISTINGUISHABLE * max(item.tokens_per_second for item in simple)

    def rank(item: Found) -> int:
        return memory_of(item.step).peak_bytes if packed else -item.plan.batch.micro_batch_size

    chosen = min((item for item in simple if item.tokens_per_second >= enough), key=rank)
    others = [item for item in found if item is not chosen]
    return [chosen, *sorted(others, key=lambda item: item.tokens_per_second, reverse=True)]


def preferred(fitting: Sequence[StepStages], *, by: Callable[[StepStages], int]) -> StepStages:
    """The fastest; among those within 1 % of it the one with the least ``by``."""
    speeds = [tokens_per_second(step) for step in fitting]
    fast_enough = INDISTINGUISHABLE * max(speeds)
    return min((step for step, speed in zip(fitting, speeds, strict=True) if speed >= fast_enough), key=by)
