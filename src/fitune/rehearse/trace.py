"""Memory events of a step in order, the worst moment of each phase by kind, and what torch's allocator reserves."""

import bisect
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from fitune.units import MIB
from fitune.values.predictions import Phase


class Allocated(NamedTuple):
    """A storage begins. ``size`` in bytes, as the tensor asked for it; ``stream`` 0 is the one that computes."""

    storage: Hashable
    size: int
    stream: int = 0


class Freed(NamedTuple):
    """Python and autograd have let go of a storage."""

    storage: Hashable


class Entered(NamedTuple):
    """The step passes into another phase."""

    phase: Phase


class Reached(NamedTuple):
    """The step reaches a decoder block: ``forward`` before it runs, ``backward`` when its output has a gradient.

    After the last block's forward, ``block`` is None.
    """

    direction: str
    block: int | None


Event = Allocated | Freed | Entered | Reached

ParameterKey = tuple[int | None, str]
"""A parameter by the index of its block (None outside of the blocks) and its name there."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """One step: what existed before it, and what happened."""

    resident: dict[Hashable, tuple[str, int]] = field(default_factory=dict)
    """Storage -> kind (weights, optimizer, batch) and bytes."""
    events: list[Event] = field(default_factory=list)
    gradients: dict[Hashable, ParameterKey] = field(default_factory=dict)
    """Storages that ended up as the gradient of a parameter."""


BLOCK = 512
"""The caching allocator hands out multiples of this; max_memory_allocated counts them (CUDACachingAllocator.cpp)."""


def rounded(size: int, *, on_cuda: bool) -> int:
    """Bytes that a request takes: CUDA's allocator gives whole blocks of 512."""
    return -(-size // BLOCK) * BLOCK if on_cuda else size


def kinds_of(trace: Trace) -> dict[Hashable, str]:
    """The kind of each storage.

    ``activations`` outlive the forward pass, ``loss`` begins in the loss, ``gradients`` end up on parameters;
    everything else is ``temporaries``, what a recomputed block makes again among them.
    """
    kinds: dict[Hashable, str] = {storage: kind for storage, (kind, _) in trace.resident.items()}
    phase = Phase.IDLE
    alive: set[Hashable] = set()
    for event in trace.events:
        match event:
            case Entered(phase=entered):
                if phase is Phase.FORWARD and entered is not phase:
                    kinds.update(dict.fromkeys(alive, "activations"))
                phase, alive = entered, set()
            case Allocated(storage=storage):
                kinds[storage] = "loss" if phase is Phase.LOSS else "temporaries"
                if phase is Phase.FORWARD:
                    alive.add(storage)
            case Freed(storage=storage):
                alive.discard(storage)
    kinds.update(dict.fromkeys(trace.gradients, "gradients"))
    return kinds


def peaks_by_kind(trace: Trace, *, on_cuda: bool) -> dict[Phase, dict[str, int]]:
    """Bytes alive at the worst moment of each phase. IDLE: what is there when the step begins."""
    kinds = kinds_of(trace)
    sizes = {storage: rounded(size, on_cuda=on_cuda) for storage, (_, size) in trace.resident.items()}
    alive: Counter[str] = Counter()
    for storage, size in sizes.items():
        alive[kinds[storage]] += size
    total = sum(sizes.values())
    batch = alive["batch"]
    worst = {Phase.IDLE: (total - batch, {kind: size for kind, size in alive.items() if kind != "batch"})}
    phase = Phase.IDLE
    for event in trace.events:
        match event:
            case Entered(phase=phase):
                pass
            case Allocated(storage=storage, size=asked):
                size = sizes[storage] = rounded(asked, on_cuda=on_cuda)
                alive[kinds[storage]] += size
                total += size
            case Freed(storage=storage):
                size = sizes.pop(storage)
                alive[kinds[storage]] -= size
                total -= size
            case _:
                continue
        if phase not in worst or total > worst[phase][0]:
            worst[phase] = (total, dict(alive))
    return {
        phase: {kind: size for kind, size in terms.items() if size} for phase, (_, terms) in worst.items()
    }


# The caching allocator (c10/cuda/CUDACachingAllocator.cpp) with expandable segments, as fitune sets it: requests round
# to 512 B; those up to 1 MiB and larger ones come from two ranges of addresses, which grow in pages of 2 and 20 MiB.
# The smallest free piece that is large enough is taken and split; a freed one joins its free neighbours. Pages are
# never given back.
_SMALL = MIB
_SMALL_PAGE, _LARGE_PAGE = 2 * MIB, 20 * MIB


class _Range:
    """Addresses from 0 to ``end``, in pieces that are taken or free; no two free ones touch."""

    def __init__(self, page: int) -> None:
        self.end = 0
        self._page = page
        self._free: list[tuple[int, int]] = []
        """Size and address of each free piece, in order."""
        self._size_at: dict[int, int] = {}
        self._free_before: dict[int, int] = {}
        """Address behind a free piece -> its own."""

    def take(self, size: int) -> int:
        """The address of ``size`` bytes: of the smallest free piece that holds them, else of new pages at the end."""
        index = bisect.bisect_left(self._free, (size, -1))
        if index == len(self._free):
            free_at_end = self.end - self._free_before.get(self.end, self.end)
            mapped = -(-(size - free_at_end) // self._page) * self._page
            self.end += mapped
            self.give_back(self.end - mapped, mapped)
            index = bisect.bisect_left(self._free, (size, -1))
        found, address = self._free[index]
        self._forget(address)
        if found > size:
            self._remember(address + size, found - size)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Frees a piece, joined with free neighbours."""
        if (after := self._size_at.get(address + size)) is not None:
            self._forget(address + size)
            size += after
        if (before := self._free_before.get(address)) is not None:
            size += self._forget(before)
            address = before
        self._remember(address, size)

    def _remember(self, address: int, size: int) -> None:
        self._size_at[address] = size
        self._free_before[address + size] = address
        bisect.insort(self._free, (size, address))

    def _forget(self, address: int) -> int:
        size = self._size_at.pop(address)
        del self._free_before[address + size]
        del self._free[bisect.bisect_left(self._free, (size, address))]
        return size


class CachingAllocator:
    """Serves requests as torch does, and counts what it had to reserve; what one stream frees serves no other."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], _Range] = {}
        self._taken: dict[Hashable, tuple[_Range, int, int]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all pages, in use or not."""
        return sum(each.end for each in self._ranges.values())

    def allocate(self, storage: Hashable, size: int, *, stream: int = 0) -> None:
        """Serve ``size`` bytes for ``storage``, of memory that ``stream`` alone reuses."""
        needed = max(BLOCK, rounded(size, on_cuda=True))
        page = _SMALL_PAGE if needed <= _SMALL else _LARGE_PAGE
        place = self._ranges.setdefault((stream, page), _Range(page))
        self._taken[storage] = (place, place.take(needed), needed)

    def free(self, storage: Hashable) -> None:
        """Give back the memory of ``storage``; raises KeyError for an unknown one."""
        place, address, size = self._taken.pop(storage)
        place.give_back(address, size)


def reserved_peak(trace: Trace) -> int:
    """Bytes reserved after the step: pages stay, so the end is the peak."""
    allocator = CachingAllocator()
    for storage, (_, size) in trace.resident.items():
        allocator.allocate(storage, size)
    for event in trace.events:
        match event:
            case Allocated(storage=storage, size=size, stream=stream):
                allocator.allocate(storage, size, stream=stream)
            case Freed(storage=storage):
                allocator.free(storage)
    return allocator.reserved_bytes
