"""The memory in which tensors wait while the device has no room for them."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


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
        """From now on its storage counts as the host's."""
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
