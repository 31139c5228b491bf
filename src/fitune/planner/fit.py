"""Plans that fit: room on device and host, the fewest recomputed blocks, the order of what fits."""

from collections.abc import Callable, Sequence
from functools import cache

from fitune.estimate.memory import memory_of
from fitune.estimate.overhead import host_terms, nvme_bytes, room_bytes, usable_host_bytes, uses_host
from fitune.estimate.predict import predict, usual_batch
from fitune.estimate.step import StepStages, describe_step
from fitune.estimate.time import step_time_of
from fitune.planner.candidates import Placement
from fitune.values.plan import Loss
from fitune.values.remembered import remembered

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
    """Peak bytes of the device with ``blocks`` recomputed and this ``loss``."""
    return memory_of(step.varied(blocks, loss)).peak_bytes


def fewest_blocks(bytes_of: BytesOf, counts: range, *, usable: int) -> int | None:
    """The first count whose bytes are at most ``usable``; None when none is.

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


@remembered
def quickest_blocks(step: StepStages, counts: range, loss: Loss, guess: int) -> int:
    """The number of blocks with which the step is fastest, whatever fits: the fewest, unless activations leave. Then it
    is faster to run a block again than to wait for what it keeps, as long as the step waits for the links to the host.
    """
    if not step.activations_leave:
        return counts[0]
    speed = cache(lambda blocks: tokens_per_second(step.varied(blocks, loss)))
    guess = max(guess, counts[0] + 1)
    return last_true(lambda count: speed(count) >= speed(count - 1), counts[0], counts[-1] + 1, guess=guess)


def cheapest_blocks(bytes_of: BytesOf, counts: range) -> int:
    """The count with the fewest bytes, the first of equals."""
    return min((counts[0], _lowest(bytes_of, counts)), key=bytes_of)


def _lowest(bytes_of: BytesOf, counts: range) -> int:
    """The count at which the bytes stop falling, by bisection of the slope; the first is looked at elsewhere.

    Offloaded activations hold the bytes nearly level until the last block alone is left, then they fall: level ground
    goes on, and the end is looked at.
    """
    first = min(counts[0] + 1, counts[-1])
    slope = last_true(lambda blocks: bytes_of(blocks) >= bytes_of(blocks + 1), first - 1, counts[-1]) + 1
    return min((slope, counts[-1]), key=bytes_of)


def host_fits(step: StepStages) -> bool:
    """True if what waits on the host and on NVMe has room there; unknown sizes are taken to be enough, and said so."""
    usable, disk = usable_host_bytes(step.plan.hardware), step.plan.hardware.nvme_bytes
    if disk and nvme_bytes(step) > disk:
        return False
    if not usable or not uses_host(step.plan):
        return True
    return sum(host_terms(step).values()) <= usable


def fits(step: StepStages) -> bool:
    """True if the peak has room on the device and what is offloaded on the host."""
    on_device = memory_of(step).peak_bytes <= room_bytes(step.plan)
    return on_device and host_fits(step)


def shortage(step: StepStages) -> tuple[bool, int]:
    """Order of plans that do not fit, the nearest to fitting first."""
    return not host_fits(step), predict(step.plan).peak_bytes


def counts_for_host(step: StepStages, counts: range) -> range | None:
    """The numbers of blocks with which offloaded activations fit the host: they only shrink with every block."""

    def fits(blocks: int) -> bool:
        """True if the host has room with so many blocks recomputed."""
        return host_fits(step.varied(blocks, step.plan.loss))

    if fits(counts[0]):
        return counts
    if not fits(counts[-1]):
        return None
    too_few = last_true(lambda blocks: not fits(blocks), counts[0], counts[-1])
    return range(too_few + 1, counts[-1] + 1)


INDISTINGUISHABLE = 0.99
"""Share of the best speed from which on no estimate tells two plans apart."""
TIE = 0.97
"""Share of the best speed from which on the simplest plan is taken."""
OFFLOADED = 0.8
"""Share of an offloading plan's speed that is enough for one that offloads nothing: offload has to gain a quarter, for
it hangs on a host and links that others use too, and that no datasheet describes."""


def tokens_per_second(step: StepStages) -> float:
    """Returns tokens per second of all devices, with average rows: ``step`` has full ones, which have to fit."""
    usual = _of_average_rows(step)
    tokens = usual.shape.tokens * step.plan.batch.accumulation * step.plan.hardware.num_gpus
    return tokens / step_time_of(usual).step_seconds


@remembered
def _of_average_rows(step: StepStages) -> StepStages:
    shape = usual_batch(step.plan)
    return step if shape == step.shape else describe_step(step.plan, shape)


def taken_first(found: Sequence[StepStages], *, packed: bool) -> list[StepStages]:
    """First the one to take: of those within 3 % of the fastest, which offloads only where that gains a quarter, the
    simplest placement, in it one that recomputes nothing, and of these the one with least memory when rows are packed,
    else with most rows at once. Then the others, the fastest first.

    Rows that are not packed are mostly shorter than seq_len: more of them keep the device busy.
    """
    if not found:
        return []

    def rank(step: StepStages) -> tuple[tuple[int, int, int], bool, int]:
        """Sort key, the best first: simplest placement, nothing recomputed, least peak bytes or else most rows."""
        size = memory_of(step).peak_bytes if packed else -step.plan.batch.micro_batch_size
        return Placement.of(step.plan).complexity, step.plan.recompute.blocks > 0, size

    speeds = [tokens_per_second(step) for step in found]
    enough = OFFLOADED * max(speeds)
    staying = [
        step
        for step, speed in zip(found, speeds, strict=True)
        if speed >= enough and Placement.of(step.plan).is_plain
    ]
    chosen = min(_fast_enough(staying or found, TIE), key=rank)
    others = [step for step in found if step is not chosen]
    return [chosen, *sorted(others, key=tokens_per_second, reverse=True)]


def least_speeds(best: float, plain: float) -> tuple[float, float]:
    """Speeds below which ``taken_first`` does not take a plan that offloads nothing, and one that does; ``best`` is the
    best speed found so far, ``plain`` that of plans that offload nothing."""
    return max(TIE * plain, OFFLOADED * best), TIE * max(best, plain / OFFLOADED)


def preferred(fitting: Sequence[StepStages], *, by: Callable[[StepStages], int]) -> StepStages:
    """The fastest; among those within 1 % of it the one with the least ``by``."""
    return min(_fast_enough(fitting, INDISTINGUISHABLE), key=by)


def _fast_enough(steps: Sequence[StepStages], share: float) -> list[StepStages]:
    """Returns the ``steps`` with at least ``share`` of the best speed."""
    enough = share * max(map(tokens_per_second, steps))
    return [step for step in steps if tokens_per_second(step) >= enough]
