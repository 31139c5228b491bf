"""Host memory beside a device, and the weights of blocks that wait there.

A block's weights are on the device while it works, and the next one's are on their way (Ren et al. 2021, arXiv
2101.06840; Rajbhandari et al. 2021, arXiv 2104.07857). Every block has one flat piece of host memory, its home, which
is copied as it is: packed weights come as the bytes they are and never go back. Embedding, final norm, head and
adapters stay on the device.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd import Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy that may not be complete yet."""

    tensor: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Let the device's stream wait for the copy."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return self.tensor

    def arrived(self) -> Tensor:
        """Block the host until the copy is complete."""
        if self.done is not None:
            self.done.synchronize()
        return self.tensor


class HostMemory:
    """Pinned memory beside a CUDA device, with a stream of its own for both directions.

    Where the device is a CPU there is no second memory, but there are books: every storage that begins while the host
    is ``working`` is the host's, and a meter of the device (measure/memory.py) leaves it out. So what a plan offloads
    is seen to be gone, and a budget for the rest can be held against it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
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
        return tensor.untyped_storage()._cdata in self._owned

    def room(self, size: int) -> Tensor:
        """``size`` bytes in one piece."""
        return self.empty_like(torch.empty(size, dtype=torch.uint8, device="meta"))

    def empty_like(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a copy, contiguous."""
        with self.working():
            room = torch.empty(
                tensor.shape, dtype=dtype or tensor.dtype, device="cpu", pin_memory=self._stream is not None
            )
            self.adopt(room)
        return room

    def take(self, tensor: Tensor) -> Copy:
        """``tensor`` of the device begins to move here; it must be left alone until the copy is waited for."""
        return self._copied(tensor, self.empty_like(tensor))

    def give(self, tensor: Tensor) -> Copy:
        """``tensor`` of the host begins to move to the device."""
        return self._copied(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device))

    def put(self, tensor: Tensor, target: Tensor) -> Copy:
        """``tensor`` of the host begins to be written into ``target`` on the device."""
        return self._copied(tensor, target)

    def _copied(self, source: Tensor, target: Tensor) -> Copy:
        if self._stream is None:
            target.copy_(source)
            return Copy(tensor=target, done=None)
        self._stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # what is copied, or whose room it takes
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return Copy(tensor=target, done=done)

    def adopt(self, tensor: Tensor) -> None:
        """Counts the tensor's storage as the host's from now on."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._owned or size == 0:
            return
        self._owned.add(key)
        self.bytes += size
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._owned.discard(key)
        self.bytes -= size


ALIGNMENT = 16
"""Bytes: the width of the widest load that kernels use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A parameter or buffer and its place in the flat memory of its block."""

    tensor: Tensor
    shape: torch.Size
    offset: int

    def point_into(self, flat: Tensor) -> None:
        part = flat[self.offset : self.offset + self.tensor.nbytes]
        self.tensor.data = part.view(self.tensor.dtype).view(self.shape)


class _StreamedBlock:
    def __init__(self, tensors: Iterable[Tensor], host: HostMemory) -> None:
        self._host = host
        self._slots, size = _laid_out(tensors)
        self.home = host.room(size)
        for slot in self._slots:
            old = slot.tensor.data
            slot.point_into(self.home)
            _as_bytes(slot.tensor.data).copy_(_as_bytes(old.contiguous()))
        self._copy: Copy | None = None

    @property
    def on_device(self) -> Tensor | None:
        """The flat memory there, or None."""
        return None if self._copy is None else self._copy.tensor

    def begin_to_come(self) -> None:
        if self._copy is None:
            self._copy = self._host.give(self.home)

    def come(self) -> None:
        self.begin_to_come()
        assert self._copy is not None
        flat = self._copy.wait()
        for slot in self._slots:
            slot.point_into(flat)

    def go(self) -> None:
        if self._copy is not None:
            self._copy.wait()  # its memory is another's from now on
            self._copy = None
            for slot in self._slots:
                slot.point_into(self.home)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightView:
    """A view of a block's weights as autograd keeps it: wherever they are when it is asked for."""

    block: _StreamedBlock
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def back(self) -> Tensor:
        flat = self.block.on_device
        assert flat is not None, "a block's weights come before it goes back"
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class StreamedWeights:
    """A Place (offload.py) for the weights of blocks; ``trained`` ones too, or frozen ones alone."""

    def __init__(self, blocks: nn.ModuleList, host: HostMemory, *, trained: bool) -> None:
        self._blocks = [_StreamedBlock(streamed_tensors(block, trained=trained), host) for block in blocks]
        self._at_work: _StreamedBlock | None = None

    def begins(self, block: int, *, shared: set[int]) -> None:
        self._only(block, block + 1)

    def ends(self, block: int) -> None:
        """The last block stays for backward, which begins with it."""
        if block == len(self._blocks) - 1 and not torch.is_grad_enabled():
            self._only(-1, -1)

    def goes_back(self, block: int) -> None:
        self._only(block, block - 1)
        if block == len(self._blocks) - 1:
            # when all is through: backward need not come to the first block, adapters may be in later ones
            Variable._execution_engine.queue_callback(lambda: self._only(-1, -1))

    def keep(self, tensor: Tensor) -> _WeightView | None:
        flat = None if self._at_work is None else self._at_work.on_device
        if flat is None or tensor.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            return None
        assert self._at_work is not None
        return _WeightView(
            block=self._at_work,
            dtype=tensor.dtype,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def _only(self, at_work: int, upcoming: int) -> None:
        """These two are on the device, the second perhaps not yet; -1 and the count are no blocks."""
        for index, block in enumerate(self._blocks):
            if index not in (at_work, upcoming):
                block.go()
        self._at_work = None
        if 0 <= at_work < len(self._blocks):
            self._at_work = self._blocks[at_work]
            self._at_work.come()
        if 0 <= upcoming < len(self._blocks):
            self._blocks[upcoming].begin_to_come()


def streamed_tensors(block: nn.Module, *, trained: bool) -> list[Tensor]:
    """Parameters and buffers of a block that wait on the host."""
    return [t for t in chain(block.parameters(), block.buffers()) if trained or not t.requires_grad]


def stay_on(device: torch.device, whole: nn.Module, blocks: nn.ModuleList, *, trained: bool) -> None:
    """Move all that is not streamed to ``device``."""
    streamed = {id(t) for block in blocks for t in streamed_tensors(block, trained=trained)}
    for tensor in chain(whole.parameters(), whole.buffers()):
        if id(tensor) not in streamed:
            tensor.data = tensor.data.to(device)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _laid_out(tensors: Iterable[Tensor]) -> tuple[list[_Slot], int]:
    """One behind the other, each at a multiple of ALIGNMENT, and the bytes of all."""
    slots, size = [], 0
    for tensor in tensors:
        slots.append(_Slot(tensor=tensor, shape=tensor.shape, offset=size))
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return slots, size
