"""A copy of what a rank saves on the host, so that the next step may change the state while the copy is written."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fitune.checkpoint.slices import Share
from fitune.models.pinned import PinnedMemory

Tables = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A share on the host."""

    share: Share
    arrived: Callable[[], object]
    """Waits until the copy is complete."""


class HostCopies:
    """Room for one copy, kept from save to save: pinned where the state is on a GPU.

    The copy is begun on the GPU's stream in which the steps run, so the next step changes nothing before it is done.
    What is on the host already (an offloaded optimizer) is copied, too: it is changed there.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, str], Tensor] = {}
        self._pinned = PinnedMemory()

    @property
    def bytes(self) -> int:
        return sum(room.nbytes for room in self._rooms.values())

    def take(self, share: Share) -> Copied:
        """Copy ``share`` over the last one, which must be written by now."""
        copy = replace(
            share, whole=self._copied("whole", share.whole), parts=self._copied("part", share.parts)
        )
        if not any(tensor.is_cuda for tensors in share.tensors for tensor in tensors.values()):
            return Copied(share=copy, arrived=lambda: None)
        done = torch.cuda.Event()
        done.record()
        return Copied(share=copy, arrived=done.synchronize)

    def _copied(self, kind: str, groups: Tables) -> Tables:
        return {
            group: {name: self._copy(f"{kind} {group}", name, tensor) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        }

    def _copy(self, kind: str, name: str, tensor: Tensor) -> Tensor:
        room = self._rooms.get((kind, name))
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            empty = self._pinned.empty if tensor.is_cuda else torch.empty
            room = empty(tensor.shape, dtype=tensor.dtype)
            self._rooms[kind, name] = room
        return room.copy_(tensor.detach(), non_blocking=True)
