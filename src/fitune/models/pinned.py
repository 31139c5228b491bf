"""Pinned memory of the host, in pieces of any size.

torch's own allocator rounds each piece up to a power of two and never gives one back: 160 GiB for the 127.5 GiB of a
70 B model. Here regions are pinned as large as they are needed and cut into rooms.
"""

import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fitune.errors import NoPinnedMemory
from fitune.units import MIB

_REGION_BYTES = 16 * MIB
"""Rooms of less than a quarter of it share a region; larger ones begin one of their own size."""
_ALIGNMENT = 64


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Region:
    memory: mmap.mmap
    bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each free piece, in order; two that touch are one."""

    @property
    def is_idle(self) -> bool:
        return self.free == [(0, self.bytes)]

    def give_back(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for piece in sorted([*self.free, (start, start + size)]):
            if merged and merged[-1][1] == piece[0]:
                piece = (merged.pop()[0], piece[1])
            merged.append(piece)
        self.free = merged

    def cut(self, size: int) -> int | None:
        """Start of a room of ``size`` bytes, or None."""
        for index, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None


class PinnedMemory:
    """Rooms for tensors; one is free again when nothing holds its storage.

    A freed room may be handed out while a copy of the device's streams still reads or writes it: who takes one must
    not touch it before such a copy is through.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """Pinned, used or not."""
        self._regions: list[_Region] = []
        # appended to in whatever thread a storage ends
        self._freed: deque[tuple[_Region, int, int]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the host. Raises NoPinnedMemory."""
        elements = shape.numel()
        if elements == 0:
            return torch.empty(shape, dtype=dtype)
        size = -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            region, start = self._found(size) or self._grown(size)
        room = torch.frombuffer(region.memory, dtype=dtype, count=elements, offset=start)
        ended = weakref.finalize(room.untyped_storage(), self._freed.append, (region, start, size))
        ended.atexit = False
        return room.view(shape)

    def _found(self, size: int) -> tuple[_Region, int] | None:
        while self._freed:
            region, *piece = self._freed.popleft()
            region.give_back(*piece)
        for region in self._regions:
            if (start := region.cut(size)) is not None:
                return region, start
        return None

    def _grown(self, size: int) -> tuple[_Region, int]:
        """The room in a new region, in the place of those that nothing is in: they are too small."""
        idle = [region for region in self._regions if region.is_idle]
        self._regions = [region for region in self._regions if not region.is_idle]
        self.bytes -= sum(region.bytes for region in idle)
        del idle
        page = mmap.PAGESIZE
        length = _REGION_BYTES if size < _REGION_BYTES // 4 else -(-size // page) * page
        region = _Region(memory=self._pinned(length), bytes=length, free=[(0, length)])
        # a memory map is gone before what it calls at its end, so the region calls, and every room holds the region
        weakref.finalize(region, _unpin, region.memory).atexit = False
        self.bytes += length
        self._regions.append(region)
        return region, region.cut(size) or 0  # at its start

    def _pinned(self, length: int) -> mmap.mmap:
        try:
            memory = mmap.mmap(-1, length)
        except OSError as error:
            raise NoPinnedMemory(length, pinned_bytes=self.bytes) from error
        if int(torch.cuda.cudart().cudaHostRegister(_address(memory), length, 0)):
            raise NoPinnedMemory(length, pinned_bytes=self.bytes)
        return memory


def _unpin(memory: mmap.mmap) -> None:
    torch.cuda.synchronize()  # a copy may be under way
    torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
