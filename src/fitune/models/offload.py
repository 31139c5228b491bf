"""Blocks whose weights or activations wait on the host while other blocks work.

Every place is told when a block begins and ends, forward and backward, and is asked for whatever autograd wants to
keep of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from fitune.models.host import HostMemory
from fitune.models.leaving import LeavingActivations
from fitune.models.streaming import StreamedWeights
from fitune.spec.plan import Offload


class Kept(Protocol):
    """What stands in autograd's graph for a tensor that is elsewhere."""

    def back(self) -> Tensor: ...


class Place(Protocol):
    """Something of every block that is on the device only around its turn."""

    def begins(self, block: int, *, shared: set[int]) -> None:
        """Before forward; ``shared`` are the storages that other blocks read too."""
        ...

    def ends(self, block: int) -> None: ...

    def goes_back(self, block: int) -> None:
        """Before backward."""
        ...

    def keep(self, tensor: Tensor) -> Kept | None:
        """What autograd shall keep in place of ``tensor``; None: it is none of this place's."""
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
        places.append(LeavingActivations(blocks, host))
    if places:
        for index, block in enumerate(blocks):
            block.forward = _placed(block.forward, index, places)
        for place in places:
            before_backward(blocks, place.goes_back)


def before_backward(blocks: Sequence[nn.Module], call: Callable[[int], None]) -> None:
    """From now on ``call(index)`` when backward reaches a block: the gradient of its output is there.

    ``call(-1)`` when it leaves the first one, if anything before that is trained.
    """
    for index, block in enumerate(blocks):
        block.register_forward_hook(lambda _, inputs, output, index=index: _watch(output, call, index))
    blocks[0].register_forward_pre_hook(lambda _, inputs: _watch(inputs, call, -1))


def _watch(hidden: Any, call: Callable[[int], None], index: int) -> None:
    def reached(_gradient: Tensor) -> None:
        call(index)

    tensor = hidden if isinstance(hidden, Tensor) else hidden[0]
    if tensor.requires_grad:
        tensor.register_hook(reached)


def _placed(forward: Callable[..., Any], index: int, places: Sequence[Place]) -> Callable[..., Any]:
    def pack(tensor: Tensor) -> Tensor | Kept:
        found = (kept for place in places if (kept := place.keep(tensor)) is not None)
        return next(found, tensor)

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        shared = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for place in places:
            place.begins(index, shared=shared)
        if torch.is_grad_enabled():
            with saved_tensors_hooks(pack, _unpack):
                output = forward(hidden, *args, **kwargs)
        else:
            output = forward(hidden, *args, **kwargs)
        for place in places:
            place.ends(index)
        return output

    return run


def _unpack(kept: Tensor | Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.back()


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
