"""Seconds in which a rank waits in collectives.

On gloo a collective is over for a rank when its own part is, so the wait holds the way of the bytes and the time until
the others came. On NCCL it is the device that waits and not the thread: there nothing is measured.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


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
        """torch's wait, of which the thread's seconds are added up."""
        with waits.waiting():
            return wait(work, *words, **named)

    def followed_future(work: Any) -> Any:
        """torch's future, by which DDP waits in C++."""
        future = get_future(work)
        waits.follow(future)
        return future

    dist.Work.wait, dist.Work.get_future = timed_wait, followed_future
    try:
        yield waits
    finally:
        dist.Work.wait, dist.Work.get_future = wait, get_future
