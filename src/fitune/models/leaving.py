"""What the blocks keep for backward leaves in forward and comes back in backward.

Of at most two blocks it is on the device: of the one at work, and of the one before that is leaving or arriving.
What the last block keeps stays, as backward begins with it.
"""

import weakref
from dataclasses import dataclass

from torch import Tensor, nn

from fitune.models.host import Copy, HostMemory


class Storage:
    """One storage that autograd keeps, whole, wherever it is; it ends with the last node that keeps it."""

    def __init__(self, flat: Tensor, host: HostMemory) -> None:
        self._flat: Tensor | None = flat
        self._host = host
        self._leaving: Copy | None = None
        self._arriving: Copy | None = None

    def leave(self) -> None:
        assert self._flat is not None
        self._leaving = self._host.take(self._flat)

    def be_gone(self) -> None:
        """From now on the device's room is free."""
        if self._leaving is not None:
            self._leaving.wait()
            self._flat = None

    def come_back(self) -> None:
        if self._flat is None and self._arriving is None:
            assert self._leaving is not None
            self._arriving = self._host.give(self._leaving.tensor)

    def on_device(self) -> Tensor:
        self.come_back()
        if self._flat is None:
            assert self._arriving is not None
            self._flat = self._arriving.wait()
            self._arriving = self._leaving = None
        return self._flat


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor as a view of a storage that may be elsewhere."""

    storage: Storage
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def back(self) -> Tensor:
        return self.storage.on_device().as_strided(self.size, self.stride, self.offset)


class LeavingActivations:
    """A Place (offload.py) for activations."""

    def __init__(self, blocks: nn.ModuleList, host: HostMemory) -> None:
        self._blocks = blocks
        self._host = host
        self._stays: set[int] = set()
        self._at_work: dict[tuple[int, object], Storage] = {}
        self._kept: dict[int, list[weakref.ref[Storage]]] = {}

    def begins(self, block: int, *, shared: set[int]) -> None:
        """Weights, and what other blocks read too, are never copied."""
        of_block = (*self._blocks[block].parameters(), *self._blocks[block].buffers())
        self._stays = shared | {tensor.untyped_storage()._cdata for tensor in of_block}
        self._at_work = {}

    def keep(self, tensor: Tensor) -> View | None:
        key = tensor.untyped_storage()._cdata
        if key in self._stays:
            return None
        storage = self._at_work.get((key, tensor.dtype))
        if storage is None:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((elements,), (1,), 0)
            storage = self._at_work[key, tensor.dtype] = Storage(flat, self._host)
        return View(
            storage=storage,
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    def ends(self, block: int) -> None:
        """What the block before kept is gone by now; what this one keeps begins to leave."""
        for storage in self._alive(block - 1):
            storage.be_gone()
        self._kept[block] = [weakref.ref(storage) for storage in self._at_work.values()]
        self._at_work = {}
        if block < len(self._blocks) - 1:
            for storage in self._alive(block):
                storage.leave()

    def goes_back(self, block: int) -> None:
        """What this block kept is here; what the block before kept comes while this one works."""
        for storage in self._alive(block):
            storage.on_device()
        for storage in self._alive(block - 1):
            storage.come_back()

    def _alive(self, block: int) -> list[Storage]:
        found = [reference() for reference in self._kept.get(block, ())]
        return [storage for storage in found if storage is not None]
