"""True if a plan has room, on the devices and on the host, and the fewest recomputed blocks with which it has."""

from collections.abc import Callable

from fitune.estimate.host import host_terms, nvme_bytes, usable_host_bytes
from fitune.estimate.memory import memory_of
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.step import StepStages
from fitune.spec.plan import Loss, Offload, Recompute

BytesOf = Callable[[int], int]
"""Peak bytes with so many blocks recomputed."""


def peak_of(step: StepStages, *, blocks: int, loss: Loss) -> int:
    return memory_of(step.varied(recompute=Recompute(blocks=blocks), loss=loss)).peak_bytes


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
    too_few = counts[0]
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if bytes_of(middle) <= usable:
            enough = middle
        else:
            too_few = middle
    return enough


def cheapest_blocks(bytes_of: BytesOf, counts: range) -> int:
    """The count with the fewest bytes, the first of equals."""
    return min((counts[0], _lowest(bytes_of, counts)), key=bytes_of)


def _lowest(bytes_of: BytesOf, counts: range) -> int:
    """Where the bytes stop falling, by bisection of the slope; the first count is looked at elsewhere.

    Offloaded activations hold the bytes level until the last block alone is left, then they fall: level ground goes on.
    """
    low, high = min(counts[0] + 1, counts[-1]), counts[-1]
    while low < high:
        middle = (low + high) // 2
        if bytes_of(middle) < bytes_of(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


def host_fits(step: StepStages) -> bool:
    """True if what waits on the host has room there; unknown host memory is taken to be enough, and said so."""
    usable = usable_host_bytes(step.plan.hardware)
    if not disk_fits(step):
        return False
    if not usable or step.plan.offload == Offload():
        return True
    return sum(host_terms(step).values()) <= usable


def disk_fits(step: StepStages) -> bool:
    """The same for what waits on NVMe."""
    usable = step.plan.hardware.nvme_bytes
    return not usable or nvme_bytes(step) <= usable


def fits(step: StepStages) -> bool:
    on_device = memory_of(step).peak_bytes <= usable_bytes(step.plan.hardware)
    return on_device and host_fits(step)


def counts_for_host(step: StepStages, counts: range) -> range | None:
    """The numbers of blocks with which offloaded activations fit the host: they only shrink with every block."""

    def fits(blocks: int) -> bool:
        return host_fits(step.varied(recompute=Recompute(blocks=blocks), loss=step.plan.loss))

    if fits(counts[0]):
        return counts
    if not fits(counts[-1]):
        return None
    low, high = counts[0], counts[-1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return range(high, counts[-1] + 1)
