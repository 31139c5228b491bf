"""After memory ran out: the same global batch in smaller micro-batches, under a plan that takes less than what failed.

What was measured counts: where the device had less than was thought, or the step needed more, the next plan is held
against that. Nothing that decides quality changes, and nothing that saved memory is given up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from fitune.errors import Shortage
from fitune.estimate.memory import memory_of
from fitune.estimate.predict import largest_batch
from fitune.estimate.step import StepStages, describe_step
from fitune.planner.candidates import block_counts, losses
from fitune.planner.fit import cheapest_blocks, fewest_blocks, preferred
from fitune.spec.plan import Batch, ChunkedLoss, Loss, Plan, Recompute
from fitune.spec.recipe import Recipe
from fitune.spec.reports import MemoryBreakdown, Phase
from fitune.spec.rules import adds_gradients_up
from fitune.spec.words import describe_loss

MEASURED = ("live tensors", "cuda allocated")
"""Kinds of measuring that count what the estimate counts."""


def smaller_plan(failed: Plan, recipe: Recipe, shortage: Shortage) -> Plan | None:
    """The plan to try next; None when no smaller micro-batch takes less where memory ran out (``why_no_smaller``).

    The largest micro-batch that has room by what is known now, with the fewest recomputed blocks and the largest
    logits that do; where none has, the plan that takes least.
    """
    known = Known.of(failed, shortage)
    smallest: StepStages | None = None
    for batch in smaller_batches(failed):
        step = described(replace(failed, batch=batch))
        fitting = _fastest(step, recipe, failed, room=known.room)
        if fitting is not None and known.is_less(memory_of(fitting)):
            return fitting.plan
        smallest = _least(step, recipe, failed)
    if smallest is not None and known.is_less(memory_of(smallest)):
        return smallest.plan
    return None


def why_no_smaller(failed: Plan, shortage: Shortage) -> str:
    """Why ``smaller_plan`` has none, in words."""
    if not adds_gradients_up(failed.tuning):
        return (
            "the micro-batch is the whole batch: gradients are used as soon as they exist and cannot be added up "
            "over several micro-batches"
        )
    if failed.batch.micro_batch_size == 1:
        return "the micro-batch is one row already"
    return f"what {shortage.doing} takes does not depend on the micro-batch"


def describe_size(plan: Plan) -> str:
    """Settings of a retry: ``micro_batch_size 2 × 4 accumulated, 0 of 32 blocks recomputed, plain loss``."""
    batch = plan.batch
    return (
        f"micro_batch_size {batch.micro_batch_size} × {batch.accumulation} accumulated, {plan.recompute.blocks} of "
        f"{plan.model.num_layers} blocks recomputed, {describe_loss(plan.loss)}"
    )


def smaller_batches(plan: Plan) -> Iterator[Batch]:
    """Half the rows with twice the accumulation, a quarter, … one; an odd number is divided as it can be."""
    batch = plan.batch
    while adds_gradients_up(plan.tuning) and batch.micro_batch_size > 1:
        rows = batch.micro_batch_size
        rows = next(m for m in range(rows // 2, 0, -1) if rows % m == 0)
        batch = replace(batch, micro_batch_size=rows, accumulation=batch.global_batch_size // rows)
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Limits of the next plan, in bytes of tensors as the estimate counts them."""

    failed: MemoryBreakdown
    phase: Phase | None
    """Where memory ran out; None: between two steps."""
    room: int

    @classmethod
    def of(cls, failed: Plan, shortage: Shortage) -> "Known":
        """Room is what the device had over how much more the step needed than was thought, and less than what failed.

        Where it is not known what the device had, the plan that failed is all there is to go by.
        """
        memory = memory_of(described(failed))
        phase = next((phase for phase in Phase if phase.value == shortage.doing), None)
        room = memory.tensor_peak_bytes - 1
        if shortage.kind in MEASURED and shortage.capacity_bytes:
            thought = memory.tensor_peak_bytes if phase is None else sum(memory.phases[phase].values())
            needed = shortage.in_use_bytes + shortage.asked_bytes
            room = min(room, int(shortage.capacity_bytes / max(1.0, needed / thought)))
        return cls(failed=memory, phase=phase, room=room)

    def is_less(self, memory: MemoryBreakdown) -> bool:
        """Less at the peak, and less where memory ran out."""
        if memory.tensor_peak_bytes >= self.failed.tensor_peak_bytes:
            return False
        phase = self.phase
        return phase is None or sum(memory.phases[phase].values()) < sum(self.failed.phases[phase].values())


def described(plan: Plan) -> StepStages:
    """The step of the largest batch that the plan allows."""
    return describe_step(plan, largest_batch(plan))


def _fastest(step: StepStages, recipe: Recipe, failed: Plan, *, room: int) -> StepStages | None:
    fitting = []
    counts = _counts(recipe, failed)
    for loss in _losses(recipe, failed):
        blocks = fewest_blocks(partial(_peak, step, loss), counts, usable=room)
        if blocks is not None:
            fitting.append(step.varied(recompute=Recompute(blocks=blocks), loss=loss))
    return preferred(fitting, by=lambda one: memory_of(one).tensor_peak_bytes) if fitting else None


def _least(step: StepStages, recipe: Recipe, failed: Plan) -> StepStages:
    loss = _losses(recipe, failed)[-1]
    blocks = cheapest_blocks(partial(_peak, step, loss), _counts(recipe, failed))
    return step.varied(recompute=Recompute(blocks=blocks), loss=loss)


def _peak(step: StepStages, loss: Loss, blocks: int) -> int:
    return memory_of(step.varied(recompute=Recompute(blocks=blocks), loss=loss)).tensor_peak_bytes


def _counts(recipe: Recipe, failed: Plan) -> range:
    """No fewer recomputed blocks than before; a pinned number stays."""
    blocks, allowed = failed.recompute.blocks, block_counts(recipe, layers=failed.model.num_layers)
    return range(blocks, max(blocks + 1, allowed.stop))


def _losses(recipe: Recipe, failed: Plan) -> tuple[Loss, ...]:
    """No larger logits than before; the failed plan's first."""
    tokens = failed.loss.chunk_tokens if isinstance(failed.loss, ChunkedLoss) else None
    smaller = (
        loss
        for loss in losses(recipe)
        if isinstance(loss, ChunkedLoss) and (tokens is None or loss.chunk_tokens < tokens)
    )
    return (failed.loss, *smaller)
