"""Blocks whose weights or activations are on the host while other blocks work.

Each Place is called when a block begins and ends, forward and backward, and for every tensor that autograd keeps.
Offloaded activations are copied out in forward and back in backward: those of at most two blocks are on the device, the
one at work and the one being copied. Those of the last block stay, because backward begins with it.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fitune.engine.host import Arrival, HostMemory
from fitune.engine.streamed_weights import StreamedWeights
from fitune.values.plan import Offload

Kept = Callable[[], Tensor]
"""A stand-in in autograd's graph for a tensor that may be on the host: brings it back."""


class Place(Protocol):
    """Something of every block that is on the device only around its turn."""

    def begins(self, block: int, *, shared: set[int]) -> None:
        """Before forward; ``shared`` are the storages that other blocks read too."""
        ...

    def ends(self, block: int) -> None:
        """After forward."""
        ...

    def goes_back(self, block: int) -> None:
        """Before backward."""
        ...

    def keep(self, tensor: Tensor) -> Kept | None:
        """The stand-in for autograd to keep; None where ``tensor`` is not this place's."""
        ...


def offload_blocks(
    blocks: nn.ModuleList, offload: Offload, host: HostMemory, *, trains_weights: bool
) -> None:
    """Give each kind of tensor that leaves the device its place on the host.

    With ``trains_weights`` what is trained is in the blocks' own weights, which wait on the host too.
    """
    places: list[Place] = []
    if offload.parameters == "cpu":
        places.append(StreamedWeights(blocks, host, trained=trains_weights))
    if offload.activations == "cpu":
        places.append(OffloadedActivations(blocks, host))
    if places:
        for index, block in enumerate(blocks):
            block.forward = _placed(block.forward, index, places)
        for place in places:
            before_backward(blocks, place.goes_back)


def before_backward(blocks: Sequence[nn.Module], call: Callable[[int], None]) -> None:
    """Calls ``call(index)``, from now on, when backward reaches a block: the gradient of its output is there.

    ``call(-1)`` when it leaves the first one, if anything before that is trained.
    """
    for index, block in enumerate(blocks):
        block.register_forward_hook(lambda _, inputs, output, index=index: _watch(output, call, index))
    blocks[0].register_forward_pre_hook(lambda _, inputs: _watch(inputs, call, -1))


def _watch(hidden: Any, call: Callable[[int], None], index: int) -> None:
    tensor = hidden if isinstance(hidden, Tensor) else hidden[0]
    if tensor.requires_grad:
        tensor.register_hook(lambda _gradient: call(index))


def _placed(forward: Callable[..., Any], index: int, places: Sequence[Place]) -> Callable[..., Any]:
    def pack(tensor: Tensor) -> Tensor | Kept:
        """The stand-in for a tensor that autograd keeps, or the tensor itself."""
        found = (kept for place in places if (kept := place.keep(tensor)) is not None)
        return next(found, tensor)

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, between the calls of its places."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shared = {tensor.untyped_storage()._cdata for tensor in tensors}
        for place in places:
            place.begins(index, shared=shared)
        if torch.is_grad_enabled():
            with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept()):
                output = forward(hidden, *args, **kwargs)
        else:
            output = forward(hidden, *args, **kwargs)
        for place in places:
            place.ends(index)
        return output

    return run


class _Storage:
    """One storage that autograd keeps, whole, wherever it is; it ends with the last node that keeps it."""

    def __init__(self, flat: Tensor, host: HostMemory) -> None:
        self.flat: Tensor | None = flat
        self.room: Tensor | None = None
        """The host's copy."""
        self.coming: Tensor | None = None
        """The device's new memory, while a copy to it is under way."""
        self.arrival = Arrival()
        self._host = host

    def free(self) -> None:
        """Free the device's copy."""
        if self.room is not None:
            self.arrival.wait()
            self.flat = None

    def on_device(self) -> Tensor:
        """Its bytes on the device; fetched and waited for where they are not there yet."""
        if self.flat is None:
            _copy_back([self], self._host)
            self.arrival.wait()
            self.flat, self.coming, self.room = self.coming, None, None
        assert self.flat is not None
        return self.flat


def _copy_back(storages: Sequence[_Storage], host: HostMemory) -> None:
    """Begins to copy storages back to the device, but for those that are there already or on their way."""
    away = [storage for storage in storages if storage.flat is None and storage.coming is None]
    targets, arrival = host.give([storage.room for storage in away if storage.room is not None])
    for storage, target in zip(away, targets, strict=True):
        storage.coming, storage.arrival = target, arrival


class OffloadedActivations:
    """The Place for activations."""

    def __init__(self, blocks: nn.ModuleList, host: HostMemory) -> None:
        self._blocks = blocks
        self._host = host
        self._stays: set[int] = set()
        self._at_work: WeakValueDictionary[tuple[int, object], _Storage] = WeakValueDictionary()
        """Storages that autograd keeps of the block at work; one that it lets go of leaves by itself."""
        self._kept: dict[int, list[weakref.ref[_Storage]]] = {}

    def begins(self, block: int, *, shared: set[int]) -> None:
        """Weights, and what other blocks read too, are never copied."""
        of_block = (*self._blocks[block].parameters(), *self._blocks[block].buffers())
        self._stays = shared | {tensor.untyped_storage()._cdata for tensor in of_block}
        self._at_work = WeakValueDictionary()

    def keep(self, tensor: Tensor) -> Kept | None:
        """Makes a view of ``tensor`` on a storage that leaves the device; None for one that stays. Views of one
        storage share it."""
        key = tensor.untyped_storage()._cdata
        if key in self._stays:
            return None
        storage = self._at_work.get((key, tensor.dtype))
        if storage is None:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((elements,), (1,), 0)
            storage = self._at_work[key, tensor.dtype] = _Storage(flat, self._host)
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        return lambda: storage.on_device().as_strided(size, stride, offset)

    def ends(self, block: int) -> None:
        """Free what the block before kept; begin to copy this one's to the host."""
        for storage in self._alive(block - 1):
            storage.free()
        self._kept[block] = [weakref.ref(storage) for storage in self._at_work.values()]
        self._at_work = WeakValueDictionary()
        if block < len(self._blocks) - 1:
            leaving = self._alive(block)
            rooms, arrival = self._host.take([each.flat for each in leaving if each.flat is not None])
            for storage, room in zip(leaving, rooms, strict=True):
                storage.room, storage.arrival = room, arrival

    def goes_back(self, block: int) -> None:
        """Wait for what this block kept; begin to copy back what the block before kept."""
        for storage in self._alive(block):
            storage.on_device()
        _copy_back(self._alive(block - 1), self._host)

    def _alive(self, block: int) -> list[_Storage]:
        found = [reference() for reference in self._kept.get(block, ())]
        return [storage for storage in found if storage is not None]
