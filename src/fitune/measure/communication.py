"""Bytes that a rank sends in a step, counted by kind of collective while it runs.

A ring sends (n−1)/n of a buffer from every rank to gather or reduce-scatter it, and twice that to all-reduce it; the
estimate counts alike (estimate/transfers.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitune.spec.reports import Sent


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    buffer: Callable[[Any], Any]
    """The arguments of the operation -> its whole buffer: the output of a gather, the input of what is summed."""
    turns: int
    """How often (n−1)/n of the buffer goes around."""


_KINDS = {
    "_allgather_base_": _Kind("gather", lambda args: args[0], 1),
    "allgather_into_tensor_coalesced_": _Kind("gather", lambda args: args[0], 1),
    "_reduce_scatter_base_": _Kind("reduce-scatter", lambda args: args[1], 1),
    "reduce_scatter_tensor_coalesced_": _Kind("reduce-scatter", lambda args: args[1], 1),
    "allreduce_": _Kind("all-reduce", lambda args: args[0], 2),
    "allreduce_coalesced_": _Kind("all-reduce", lambda args: args[0], 2),
}


class SentBytes(TorchDispatchMode):
    """Counts the collectives of this process that run inside, and what they make it send."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    @property
    def sent(self) -> tuple[Sent, ...]:
        return tuple(
            Sent(kind=kind, calls=self._calls[kind], bytes=round(size)) for kind, size in self._bytes.items()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func._schema.name.partition("::")[2]) if func.namespace == "c10d" else None
        if kind is not None:
            size = sum(leaf.nbytes for leaf in tree_leaves(kind.buffer(args)) if isinstance(leaf, Tensor))
            ranks = _ranks_of(args)
            self._calls[kind.name] = self._calls.get(kind.name, 0) + 1
            self._bytes[kind.name] = self._bytes.get(kind.name, 0.0) + kind.turns * size * (ranks - 1) / ranks
        return func(*args, **(kwargs or {}))


def _ranks_of(args: Any) -> int:
    """Processes of the group that an operation runs in; it is the first argument that is no tensor."""
    group = next(arg for arg in args if type(arg).__name__ in ("ScriptObject", "FakeScriptObject"))
    size: int = dist.ProcessGroup.unbox(group).size()
    return size
