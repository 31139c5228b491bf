"""Tensors that are read when they are asked for, and a count of the bytes that were."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fitune.models.weight_files import StoredTensor

OnBytes = Callable[[int, int], None]
"""Told bytes read and bytes in all; by several threads, one after the other."""


def nobody(done: int, total: int) -> None:
    """For those who do not want to know."""


class _Count:
    def __init__(self, total: int, tell: OnBytes) -> None:
        self._total, self._tell = total, tell
        self._done = 0
        self._lock = Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._tell(self._done, self._total)

    def end(self) -> None:
        """What nobody asked for is not waited for."""
        if self._done < self._total:
            self.add(self._total - self._done)


class Unread:
    """A tensor that is still in its file; ``unread[...]`` reads it."""

    def __init__(self, part: Any, stored: StoredTensor, count: _Count) -> None:
        self._part, self._stored, self._count = part, stored, count

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self._part[index]
        self._count.add(self._stored.size_bytes)
        return tensor

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        return self._stored.dtype


@contextmanager
def unread_tensors(stored: Mapping[str, StoredTensor], on_bytes: OnBytes) -> Iterator[dict[str, Unread]]:
    """Every tensor by name, none of them in memory yet. The files are open inside."""
    count = _Count(sum(tensor.size_bytes for tensor in stored.values()), on_bytes)
    with ExitStack() as stack:
        files: dict[Path, Any] = {
            file: stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            for file in sorted({tensor.file for tensor in stored.values()})
        }
        yield {name: Unread(files[t.file].get_slice(name), t, count) for name, t in stored.items()}
        count.end()
