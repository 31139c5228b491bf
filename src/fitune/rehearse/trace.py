"""Memory events of a step in order, the worst moment of each phase by kind, and what torch's allocator reserves."""

import bisect
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from fitune.spec.predictions import Phase
from fitune.units import MIB


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


# The caching allocator (c10/cuda/CUDACachingAllocator.cpp): requests round to 512 B; up to 1 MiB come from segments of
# 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from segments of their own size rounded to 2 MiB. The
# smallest free block that is large enough is taken and split; a freed block joins its free neighbours. Segments are
# never given back. With expandable segments each pool is one range of addresses that grows in pages of 2 or 20 MiB.
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_MEDIUM = 10 * MIB
_MEDIUM_SEGMENT = 20 * MIB
_ROUND_LARGE = 2 * MIB


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment. ``before`` and ``after`` are its neighbours there."""

    address: int
    size: int
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class _Pool:
    """Small or large requests, which never share a segment."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.expandable = expandable
        self.reserved_bytes = 0
        self._free: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}
        self._next_address = 0
        self._last: _Block | None = None

    def take(self, size: int) -> _Block:
        """A block of ``size`` bytes or more: the best free one, else of a new segment; a large rest is split off."""
        index = bisect.bisect_left(self._free, (size, -1))
        block = self._grow(size) if index == len(self._free) else self._blocks[self._free.pop(index)[1]]
        block.free = False
        rest = block.size - size
        if rest >= BLOCK if self.small or self.expandable else rest > _SMALL:
            self._split(block, size)
        return block

    def give_back(self, block: _Block) -> None:
        """Free ``block``, joined with free neighbours."""
        block.free = True
        if block.before is not None and block.before.free:
            self._forget(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._forget(block.after)
            block = self._join(block, block.after)
        self._remember(block)

    def _grow(self, size: int) -> _Block:
        if self.expandable:
            return self._extend(size)
        segment = _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if size <= _SMALL:
            segment = _SMALL_SEGMENT
        self.reserved_bytes += segment
        block = _Block(self._next_address, segment)
        self._blocks[block.address] = block
        self._next_address += segment + 1  # segments do not touch
        return block

    def _extend(self, size: int) -> _Block:
        """Map as many pages behind the end as the free block there lacks."""
        page = _SMALL_SEGMENT if self.small else _MEDIUM_SEGMENT
        last = self._last if self._last is not None and self._last.free else None
        lacking = size - (last.size if last is not None else 0)
        mapped = -(-lacking // page) * page
        self.reserved_bytes += mapped
        block = _Block(self._next_address, mapped, before=self._last)
        self._next_address += mapped
        self._blocks[block.address] = block
        if self._last is not None:
            self._last.after = block
        self._last = block
        if last is not None:
            self._forget(last)
            block = self._join(last, block)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        if self._last is block:
            self._last = rest
        block.after, block.size = rest, size
        self._remember(rest)

    def _join(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._last is second:
            self._last = first
        del self._blocks[second.address]
        return first

    def _remember(self, block: _Block) -> None:
        self._blocks[block.address] = block
        bisect.insort(self._free, (block.size, block.address))

    def _forget(self, block: _Block) -> None:
        del self._free[bisect.bisect_left(self._free, (block.size, block.address))]


class CachingAllocator:
    """Serves requests as torch does, and counts what it had to reserve; what one stream frees serves no other."""

    def __init__(self, *, expandable: bool) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._taken: dict[Hashable, tuple[_Pool, _Block]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments, in use or not."""
        return sum(pool.reserved_bytes for pool in self._pools.values())

    def allocate(self, storage: Hashable, size: int, *, stream: int = 0) -> None:
        """Serve ``size`` bytes for ``storage``, of memory that ``stream`` alone reuses."""
        needed = max(BLOCK, rounded(size, on_cuda=True))
        kind = stream, needed <= _SMALL
        if kind not in self._pools:
            self._pools[kind] = _Pool(small=needed <= _SMALL, expandable=self._expandable)
        pool = self._pools[kind]
        self._taken[storage] = (pool, pool.take(needed))

    def free(self, storage: Hashable) -> None:
        """Give back the memory of ``storage``; raises KeyError for an unknown one."""
        pool, block = self._taken.pop(storage)
        pool.give_back(block)


def reserved_peak(trace: Trace) -> int:
    """Bytes reserved after the step, in expandable segments: they stay, so the end is the peak."""
    allocator = CachingAllocator(expandable=True)
    for storage, (_, size) in trace.resident.items():
        allocator.allocate(storage, size)
    for event in trace.events:
        match event:
            case Allocated(storage=storage, size=size, stream=stream):
                allocator.allocate(storage, size, stream=stream)
            case Freed(storage=storage):
                allocator.free(storage)
    return allocator.reserved_bytes
