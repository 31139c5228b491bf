"""Weights of blocks that wait in host memory.

A block's weights are on the device while it works, and the next one's are on their way (Ren et al. 2021, arXiv
2101.06840; Rajbhandari et al. 2021, arXiv 2104.07857). Every block has one flat piece of host memory, its home, which
is copied as it is: packed weights come as the bytes they are and never go back. Embedding, final norm, head and
adapters stay on the device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from fitune.engine.host import Arrival, HostMemory

ALIGNMENT = 16
"""Bytes: the width of the widest load that kernels use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A parameter or buffer and its place in the flat memory of its block."""

    tensor: Tensor
    offset: int

    def point_into(self, flat: Tensor) -> None:
        """The tensor becomes a view of ``flat`` (bytes) at its offset."""
        part = flat[self.offset : self.offset + self.tensor.nbytes]
        self.tensor.data = part.view(self.tensor.dtype).view(self.tensor.shape)


class _StreamedBlock:
    def __init__(self, tensors: Iterable[Tensor], host: HostMemory) -> None:
        self._host = host
        self._slots: list[_Slot] = []
        size = 0
        for tensor in tensors:  # one behind the other, each at a multiple of ALIGNMENT
            self._slots.append(_Slot(tensor=tensor, offset=size))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self.home = host.room(size)
        for slot in self._slots:
            old = slot.tensor.data
            slot.point_into(self.home)
            _as_bytes(slot.tensor.data).copy_(_as_bytes(old.contiguous()))
        self.on_device: Tensor | None = None
        """The flat memory there."""
        self._arrival = Arrival()

    def begin_to_come(self) -> None:
        """Starts the copy to the device; does nothing where it is begun or there."""
        if self.on_device is None:
            [self.on_device], self._arrival = self._host.give([self.home])

    def come(self) -> None:
        """The weights are on the device for all work queued after this."""
        self.begin_to_come()
        assert self.on_device is not None
        self._arrival.wait()
        for slot in self._slots:
            slot.point_into(self.on_device)

    def go(self) -> None:
        """The weights are those on the host again, and their device memory is free."""
        if self.on_device is not None:
            self._arrival.wait()  # its memory is another's from now on
            self.on_device = None
            for slot in self._slots:
                slot.point_into(self.home)


class StreamedWeights:
    """A Place (offload.py) for the weights of blocks; ``trained`` ones too, or frozen ones alone."""

    def __init__(self, blocks: nn.ModuleList, host: HostMemory, *, trained: bool) -> None:
        self._blocks = [_StreamedBlock(streamed_tensors(block, trained=trained), host) for block in blocks]
        self._at_work: _StreamedBlock | None = None

    def begins(self, block: int, *, shared: set[int]) -> None:
        """This block's weights are on the device, and the next block's begin to come."""
        self._only(block, block + 1)

    def ends(self, block: int) -> None:
        """The last block stays for backward, which begins with it."""
        if block == len(self._blocks) - 1 and not torch.is_grad_enabled():
            self._only(-1, -1)

    def goes_back(self, block: int) -> None:
        """This block's weights are on the device, and those of the block before it begin to come."""
        self._only(block, block - 1)
        if block == len(self._blocks) - 1:
            # when all is through: backward need not come to the first block, adapters may be in later ones
            Variable._execution_engine.queue_callback(lambda: self._only(-1, -1))

    def keep(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """A view of a block's weights is made anew, wherever they are when it is asked for."""
        block = self._at_work
        flat = None if block is None else block.on_device
        if flat is None or tensor.untyped_storage()._cdata != flat.untyped_storage()._cdata:
            return None
        dtype, size, stride, offset = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

        def back() -> Tensor:
            """The view as it was, of the block's memory on the device now."""
            now = None if block is None else block.on_device
            assert now is not None, "a block's weights come before it goes back"
            return now.view(dtype).as_strided(size, stride, offset)

        return back

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
