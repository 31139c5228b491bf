"""A block is a row of stages; backward visits them in reverse. The timeline is computed over these."""

from collections.abc import Sequence
from dataclasses import dataclass

from fitune.spec.block_profile import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPeak:
    """The worst moment of going back through some stages."""

    kept: int
    gradients: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.kept + self.gradients + self.temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The stages of one block in sum: all that the timeline asks of it."""

    kept: int
    gradients: int
    forward: int
    """The worst moment of its forward when nothing is kept."""
    building: int
    """The worst moment of its forward while what autograd keeps piles up."""
    peak: BackwardPeak
    recomputed_peak: BackwardPeak
    """The same when it first runs again."""


def untouched_block(stages: Sequence[Stage]) -> Block:
    """One that no gradient reaches: it keeps nothing and never goes back."""
    nothing = BackwardPeak(kept=0, gradients=0, temporaries=0)
    return Block(
        kept=0,
        gradients=0,
        forward=max(stage.forward for stage in stages),
        building=0,
        peak=nothing,
        recomputed_peak=nothing,
    )


def block_of(stages: Sequence[Stage], *, gradients_exist: bool) -> Block:
    peak = backward_peak(stages, gradients_exist=gradients_exist)
    again = _running_again(stages)
    return Block(
        kept=sum(stage.kept for stage in stages),
        gradients=sum(stage.gradients for stage in stages),
        forward=max(stage.forward for stage in stages),
        peak=peak,
        building=again.total,
        recomputed_peak=max(peak, again, key=lambda moment: moment.total),
    )


def backward_peak(stages: Sequence[Stage], *, gradients_exist: bool) -> BackwardPeak:
    """The worst moment of a block's backward, which goes from the last stage to the first.

    At stage j it holds what stages 0…j keep, its own temporaries, and the gradients of stages j…last. When they
    ``gradients_exist`` from an earlier micro-batch (the caller counts those), the fresh gradient of one
    parameter is a temporary until it is added in place.
    """
    kept = sum(stage.kept for stage in stages)
    gradients = 0
    worst: BackwardPeak | None = None
    for stage in reversed(stages):
        fresh = stage.largest_gradient if gradients_exist else 0
        gradients += 0 if gradients_exist else stage.gradients
        moment = BackwardPeak(kept=kept, gradients=gradients, temporaries=stage.backward + fresh)
        if worst is None or moment.total > worst.total:
            worst = moment
        kept -= stage.kept
    assert worst is not None
    return worst


def _running_again(stages: Sequence[Stage]) -> BackwardPeak:
    """The worst moment of the forward that a recomputed block repeats before it goes back."""
    kept = 0
    worst = BackwardPeak(kept=0, gradients=0, temporaries=0)
    for stage in stages:
        kept += stage.kept
        if stage.again and kept + stage.again > worst.total:
            worst = BackwardPeak(kept=kept, gradients=0, temporaries=stage.again)
    return worst
