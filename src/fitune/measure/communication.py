"""Seconds in which a rank waits in collectives, and bytes that it sends, by kind.

On gloo a collective is over for a rank when its own part is, so the wait holds the way of the bytes and the time until
the others came. On NCCL it is the device that waits and not the thread: there nothing is measured.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Waits:
    """Seconds that the thread which trains has waited for other ranks."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        self._seconds = 0.0
        self._begun = self._ended = 0.0
        self._under_way = 0

    def take(self) -> float:
        """Seconds since the last call.

        DDP waits in C++ for the sums that it began in backward: from the last one begun to the last one ended.
        """
        last = time.perf_counter() if self._under_way else self._ended
        seconds = self._seconds + (max(last - self._begun, 0.0) if self._begun else 0.0)
        self._seconds = self._begun = self._ended = 0.0
        return seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this thread waits; a wait within another is part of it."""
        if threading.get_ident() != self._thread or self._depth:
            yield
            return
        began = time.perf_counter()
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            self._seconds += time.perf_counter() - began

    def follow(self, future: Any) -> None:
        """Note when a collective that nobody in Python waits for begins, now, and when it ends."""
        if threading.get_ident() != self._thread:
            return
        self._begun = time.perf_counter()
        self._under_way += 1
        future.add_done_callback(self._note_end)

    def _note_end(self, _: Any) -> None:
        self._ended = time.perf_counter()
        self._under_way -= 1


@contextmanager
def waits_measured() -> Iterator[Waits | None]:
    """Inside, every wait for a collective is timed, at a cost of two looks at the clock; None without a group of gloo.

    torch tells nobody how long gloo takes, so the method that all Python code waits by is wrapped meanwhile.
    """
    if not dist.is_initialized() or torch.cuda.is_available():
        yield None
        return
    waits, wait, get_future = Waits(), dist.Work.wait, dist.Work.get_future

    def timed_wait(work: Any, *words: Any, **named: Any) -> Any:
        with waits.waiting():
            return wait(work, *words, **named)

    def followed_future(work: Any) -> Any:
        future = get_future(work)
        waits.follow(future)
        return future

    dist.Work.wait, dist.Work.get_future = timed_wait, followed_future
    try:
        yield waits
    finally:
        dist.Work.wait, dist.Work.get_future = wait, get_future


@dataclass(slots=True)
class Sent:
    """``calls`` of one kind of collective, and the ``bytes`` that this rank sends in them as a ring does."""

    calls: int = 0
    bytes: float = 0.0


class Collectives(TorchDispatchMode):
    """Counts the collectives of tensors that run inside, by kind: all-reduce, all-gather, reduce-scatter, broadcast.

    A ring of n sends (n−1)/n of a buffer to gather or to reduce-scatter it, and twice that to all-reduce it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Sent] = {}

    @property
    def total_bytes(self) -> float:
        """Bytes of all kinds together."""
        return sum(each.bytes for each in self.sent.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: Any) -> None:
        kind = next((kind for sign, kind in _KINDS.items() if operation.startswith(sign)), operation)
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        n = dist.ProcessGroup.unbox(group).size()
        tensors = [each for arg in args[:2] for each in (arg if isinstance(arg, list) else [arg])]
        sizes = [t.nbytes for t in tensors if isinstance(t, torch.Tensor)]
        whole = sum(sizes) if kind in ("all-reduce", "broadcast") else max(sizes, default=0)
        found = self.sent.setdefault(kind, Sent())
        found.calls += 1
        found.bytes += whole * (n - 1) / n * (2 if kind == "all-reduce" else 1)


_KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "broadcast": "broadcast",
}
"""Beginnings of torch's names."""
