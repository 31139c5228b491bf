"""Plans that fit: room on device and host, the fewest recomputed blocks; the next smaller plan when memory ran out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fitune.errors import Shortage
from fitune.estimate.memory import memory_of
from fitune.estimate.overhead import host_terms, nvme_bytes, room_bytes, usable_host_bytes, uses_host
from fitune.estimate.predict import largest_batch, predict
from fitune.estimate.step import StepStages, describe_step
from fitune.estimate.time import step_time_of
from fitune.planner.candidates import Placement, block_counts, losses
from fitune.spec.plan import Batch, ChunkedLoss, Loss, Plan
from fitune.spec.predictions import MemoryBreakdown, Phase
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.rules import adds_gradients_up
from fitune.spec.words import describe_loss

BytesOf = Callable[[int], int]
"""Peak bytes with so many blocks recomputed."""


def last_true(holds: Callable[[int], bool], low: int, high: int, *, guess: int = 0) -> int:
    """The last number for which ``holds``, by bisection; it is taken to hold at ``low`` and not at ``high``.

    A ``guess`` between them is looked at first, then the numbers next to it in growing steps.
    """
    low, high = _bracket(holds, low, high, guess) if low < guess < high else (low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bracket(holds: Callable[[int], bool], low: int, high: int, guess: int) -> tuple[int, int]:
    """Bounds that are near ``guess`` if it is near the last number that holds."""
    upwards = holds(guess)
    low, high = (guess, high) if upwards else (low, guess)
    step = 1
    while high - low > step:
        number = low + step if upwards else high - step
        if holds(number) != upwards:
            return (low, number) if upwards else (number, high)
        low, high = (number, high) if upwards else (low, number)
        step *= 2
    return low, high


def peak_of(step: StepStages, *, blocks: int, loss: Loss) -> int:
    return memory_of(step.varied(blocks, loss)).peak_bytes


def fewest_blocks(bytes_of: BytesOf, counts: range, *, usable: int) -> int | None:
    """The first count whose bytes are at most ``usable``; None when none is. Fewer blocks are always faster.

    From 1 on, bytes are a maximum of straight lines in the count, some falling (what is no longer kept), some
    rising (one more input held while the block itself is back): they fall, then rise. So the counts that fit
    are neighbours: bisection from any one of them down finds the first. 0 is looked at alone.
    """
    if bytes_of(counts[0]) <= usable:
        return counts[0]
    enough = (
        counts[-1] - 1
        if len(counts) > 2 and bytes_of(counts[-1] - 1) <= usable
        else _lowest(bytes_of, counts)
    )
    if bytes_of(enough) > usable:
        return None
    most, least = bytes_of(counts[0]), bytes_of(enough)
    on_a_line = counts[0] + (enough - counts[0]) * (most - usable) // (most - least)
    return last_true(lambda blocks: bytes_of(blocks) > usable, counts[0], enough, guess=on_a_line) + 1


def cheapest_blocks(bytes_of: BytesOf, counts: range) -> int:
    """The count with the fewest bytes, the first of equals."""
    return min((counts[0], _lowest(bytes_of, counts)), key=bytes_of)


def _lowest(bytes_of: BytesOf, counts: range) -> int:
    """The count at which the bytes stop falling, by bisection of the slope; the first is looked at elsewhere.

    Offloaded activations hold the bytes level until the last block alone is left, then they fall: level ground goes on.
    """
    first = min(counts[0] + 1, counts[-1])
    return last_true(lambda blocks: bytes_of(blocks) >= bytes_of(blocks + 1), first - 1, counts[-1]) + 1


def host_fits(step: StepStages) -> bool:
    """True if what waits on the host has room there; unknown host memory is taken to be enough, and said so."""
    usable = usable_host_bytes(step.plan.hardware)
    if not disk_fits(step):
        return False
    if not usable or not uses_host(step.plan):
        return True
    return sum(host_terms(step).values()) <= usable


def disk_fits(step: StepStages) -> bool:
    """True if the offloaded state has room on NVMe, or its size is not known."""
    usable = step.plan.hardware.nvme_bytes
    return not usable or nvme_bytes(step) <= usable


def fits(step: StepStages) -> bool:
    on_device = memory_of(step).peak_bytes <= room_bytes(step.plan)
    return on_device and host_fits(step)


def shortage(step: StepStages) -> tuple[bool, int]:
    """Order of plans that do not fit, the nearest to fitting first."""
    return not host_fits(step), predict(step.plan).peak_bytes


def counts_for_host(step: StepStages, counts: range) -> range | None:
    """The numbers of blocks with which offloaded activations fit the host: they only shrink with every block."""

    def fits(blocks: int) -> bool:
        return host_fits(step.varied(blocks, step.plan.loss))

    if fits(counts[0]):
        return counts
    if not fits(counts[-1]):
        return None
    too_few = last_true(lambda blocks: not fits(blocks), counts[0], counts[-1])
    return range(too_few + 1, counts[-1] + 1)


INDISTINGUISHABLE = 0.99
"""Share of the best speed from which on no estimate tells two plans apart."""
SIMPLER_IS_WORTH = 0.95
"""Share of the best speed at which a placement that is simpler is taken in its place."""
STAYING_IS_WORTH = 0.80
"""Share of the best speed at which a plan that offloads nothing is taken in place of one that does: the gain hangs on
links and copies that others use too."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits, the fastest of its placement and batch."""

    step: StepStages
    tokens_per_second: float

    @property
    def plan(self) -> Plan:
        return self.step.plan

    @property
    def placement(self) -> Placement:
        return Placement(sharding=self.plan.sharding, offload=self.plan.offload)


def tokens_per_second(step: StepStages) -> float:
    """Tokens per second of all devices together."""
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
    """Reason why ``smaller_plan`` finds no plan, in words."""
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
            fitting.append(step.varied(blocks, loss))
    return preferred(fitting, by=lambda one: memory_of(one).tensor_peak_bytes) if fitting else None


def _least(step: StepStages, recipe: Recipe, failed: Plan) -> StepStages:
    loss = _losses(recipe, failed)[-1]
    blocks = cheapest_blocks(partial(_peak, step, loss), _counts(recipe, failed))
    return step.varied(blocks, loss)


def _peak(step: StepStages, loss: Loss, blocks: int) -> int:
    return memory_of(step.varied(blocks, loss)).tensor_peak_bytes


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
