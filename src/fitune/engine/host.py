"""Host memory beside a device: how it is pinned, and how tensors move between the two."""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fitune.errors import NoPinnedMemory, is_out_of_memory
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

    def give_back(self, start: int, size: int) -> None:
        """Free ``size`` bytes from ``start`` on, joined with the free pieces beside them."""
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
        self._regions: list[_Region] = []
        # appended to in whatever thread a storage ends
        self._freed: deque[tuple[_Region, int, int]] = deque()
        self._lock = threading.RLock()

    @property
    def bytes(self) -> int:
        """Pinned, used or not."""
        return sum(region.bytes for region in self._regions)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the host. Raises NoPinnedMemory."""
        elements = shape.numel()
        if elements == 0:
            return torch.empty(shape, dtype=dtype)
        size = -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            region, start = self._found(size) or self._grown(size)
        storage = torch.frombuffer(region.memory, dtype=dtype, count=elements, offset=start).untyped_storage()
        weakref.finalize(storage, self._freed.append, (region, start, size)).atexit = False
        # no view: one whose ``data`` is replaced would hold its base, and with it the room
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)

    def unpin_idle(self) -> None:
        """Let regions go that nothing is in."""
        with self._lock:
            self._take_back()
            self._regions = [region for region in self._regions if region.free != [(0, region.bytes)]]

    def _take_back(self) -> None:
        while self._freed:
            region, *piece = self._freed.popleft()
            region.give_back(*piece)

    def _found(self, size: int) -> tuple[_Region, int] | None:
        self._take_back()
        for region in self._regions:
            if (start := region.cut(size)) is not None:
                return region, start
        return None

    def _grown(self, size: int) -> tuple[_Region, int]:
        """The room in a new region, in the place of those that nothing is in: they are too small."""
        self.unpin_idle()
        page = mmap.PAGESIZE
        length = _REGION_BYTES if size < _REGION_BYTES // 4 else -(-size // page) * page
        region = _Region(memory=self._pinned(length), bytes=length, free=[(0, length)])
        # a memory map is gone before what it calls at its end, so the region calls, and every room holds the region
        weakref.finalize(region, _unpin, region.memory).atexit = False
        self._regions.append(region)
        return region, region.cut(size) or 0  # at its start

    def _pinned(self, length: int) -> mmap.mmap:
        try:
            memory = mmap.mmap(-1, length)
        except OSError as error:
            raise NoPinnedMemory(length, pinned_bytes=self.bytes) from error
        if int(torch.cuda.cudart().cudaHostRegister(_address(memory), length, 0)):
            # CUDA remembers the error, and torch would blame its next kernel for it
            with suppress(RuntimeError):
                torch.ones((), device="cuda")
            raise NoPinnedMemory(length, pinned_bytes=self.bytes)
        return memory


def _unpin(memory: mmap.mmap) -> None:
    torch.cuda.synchronize()  # a copy may be under way
    torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@contextmanager
def pinning(asked_bytes: int, *, pinned_bytes: int) -> Iterator[None]:
    """Inside, torch pins memory: what the driver has none for is raised as NoPinnedMemory.

    Its words are those of a full GPU, "CUDA error: out of memory", but for that torch has a type of its own.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "AcceleratorError" or not is_out_of_memory(error):
            raise
        raise NoPinnedMemory(asked_bytes, pinned_bytes=pinned_bytes) from error


@dataclass(slots=True)
class Arrival:
    """End of copies that were begun together."""

    done: torch.cuda.Event | None = None
    is_waited_for: bool = False

    def wait(self) -> None:
        """Let the device's stream wait for them, once."""
        if self.done is not None and not self.is_waited_for:
            torch.cuda.current_stream().wait_event(self.done)
            self.is_waited_for = True

    def block(self) -> None:
        """Block this thread until they are through."""
        if self.done is not None:
            self.done.synchronize()


class HostMemory:
    """Pinned memory beside a CUDA device, a stream for each direction, and a thread for what the host computes.

    Rooms that only copies use are apart from those that the host writes: the streams order copies, and the host waits
    for none of them when it takes a room.

    Where the device is a CPU there is no second memory, but there are books: every storage that begins while the host
    is ``working`` is the host's, and a meter of the device (measure/memory.py) leaves it out. So what a plan offloads
    is seen to be gone, and a budget for the rest can be held against it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        """To the host, and to the device."""
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._kept, self._passing = PinnedMemory(), PinnedMemory()
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host")
        self._owned: set[int] = set()
        self._is_working = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Storages that begin inside count as the host's."""
        before, self._is_working = self._is_working, True
        try:
            yield
        finally:
            self._is_working = before

    def claims(self, tensor: Tensor) -> bool:
        """True if its storage is the host's; one that begins while the host is working becomes so."""
        if self._is_working:
            self.adopt(tensor)
        return self.owns(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """True if the tensor's storage is the host's."""
        return tensor.untyped_storage()._cdata in self._owned

    def room(self, size: int) -> Tensor:
        """``size`` bytes in one piece."""
        return self.empty_like(torch.empty(size, dtype=torch.uint8, device="meta"))

    def empty_like(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a copy, contiguous, that the host may write. Raises NoPinnedMemory."""
        return self._empty(tensor.shape, dtype or tensor.dtype, passing=False)

    def unpin_idle(self) -> None:
        """Let go what is pinned and holds nothing."""
        if self._streams is not None:
            self._kept.unpin_idle()

    def reserve_copies(self, tensors: Sequence[Tensor]) -> None:
        """Let torch's own allocator pin room for a copy of each tensor, which it keeps: who copies by it to the host
        (FSDP2 its gradients) finds it there. Raises NoPinnedMemory here and not in the middle of a step."""
        if self._streams is None:
            return
        rooms: list[Tensor] = []
        for tensor in tensors:
            pinned = self._kept.bytes + self._passing.bytes + sum(room.nbytes for room in rooms)
            with pinning(tensor.nbytes, pinned_bytes=pinned):
                rooms.append(torch.empty_like(tensor, device="cpu", pin_memory=True))

    def take(
        self, tensors: Sequence[Tensor], rooms: Sequence[Tensor | None] = ()
    ) -> tuple[Sequence[Tensor], Arrival]:
        """``tensors`` of the device begin to move to ``rooms`` here, new ones where none are named. They must be left
        alone, and new rooms not be written, until the copies are waited for. What is here already is its own copy."""
        if self._streams is not None and not any(tensor.is_cuda for tensor in tensors):
            return tensors, Arrival()
        into = [
            self._empty(tensor.shape, tensor.dtype, passing=True) if room is None else room
            for tensor, room in zip(tensors, rooms or [None] * len(tensors), strict=True)
        ]
        return into, self._copied(tensors, into, to_device=False)

    def give(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Arrival]:
        """``tensors`` of the host begin to move to the device."""
        targets = [torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device) for tensor in tensors]
        return targets, self.put(tensors, targets)

    def put(self, tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> Arrival:
        """``tensors`` of the host begin to be written into ``targets`` on the device."""
        return self._copied(tensors, targets, to_device=True)

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin ``work`` in the host's own thread, one after the other; call what is returned to wait for its end.

        On a CPU, whose cores are at work, it is done at once.
        """
        if self._streams is None:
            with self.working():
                work()
            return lambda: None
        return self._thread.submit(work).result

    def _empty(self, shape: torch.Size, dtype: torch.dtype, *, passing: bool) -> Tensor:
        if self._streams is not None:
            return (self._passing if passing else self._kept).empty(shape, dtype)
        with self.working():
            room = torch.empty(shape, dtype=dtype)
            self.adopt(room)
        return room

    def _copied(self, sources: Sequence[Tensor], targets: Sequence[Tensor], *, to_device: bool) -> Arrival:
        if self._streams is None or not sources:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return Arrival()
        stream = self._streams[to_device]
        stream.wait_stream(torch.cuda.current_stream(self.device))  # what is copied, or whose room it takes
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return Arrival(done)

    def adopt(self, tensor: Tensor) -> None:
        """Counts the tensor's storage as the host's from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._owned and storage.nbytes():
            self._owned.add(storage._cdata)
            weakref.finalize(storage, self._owned.discard, storage._cdata)
