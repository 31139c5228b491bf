"""Peak bytes by phase of a real step.

On CUDA torch counts for us: its peak statistic is reset at every change of phase. On a CPU nobody
counts, so a dispatch mode watches every operation of the measured step: the storages it makes, and
their end. Both answer the same question: how many bytes of tensors were alive at the worst moment.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitune.values.predictions import Phase
from fitune.values.reports import MeterKind


class OtherMemory(Protocol):
    """The place of tensors that the device does not hold, although a CPU has them in the same chips."""

    def claims(self, tensor: Tensor) -> bool:
        """True if the tensor's storage is not to be counted as the device's."""
        ...


class MemoryMeter(ABC):
    """Measures the steps it is opened for; ``enter`` is told of every change of phase."""

    kind: MeterKind

    def __init__(self) -> None:
        self._peaks: dict[Phase, int] = {}

    @abstractmethod
    def measuring(
        self, alive: Callable[[], Iterable[Tensor]], host: OtherMemory | None = None
    ) -> AbstractContextManager[None]:
        """Measure what runs inside. ``alive`` lists the tensors that exist before; the ``host``'s do not count."""

    @abstractmethod
    def enter(self, phase: Phase) -> None:
        """Peaks from now on belong to ``phase``."""

    def take_peaks(self) -> dict[Phase, int]:
        """The peaks since the last call; empty when nothing was measured."""
        peaks, self._peaks = self._peaks, {}
        return peaks


class LiveTensors(TorchDispatchMode):
    """Bytes of all tensor storages alive, by phase. ``alive`` are those that existed before.

    Views share a storage and count once; a storage ends when Python and autograd have let go of it. Those that
    ``host`` claims are not counted.
    """

    def __init__(self, alive: Iterable[Tensor], host: OtherMemory | None = None) -> None:
        super().__init__()
        self._host = host
        self.peaks: dict[Phase, int] = {}
        self.phase = Phase.IDLE
        self.current_bytes = 0
        self._sizes: dict[int, int] = {}
        for tensor in alive:
            self._add(tensor)
        self.enter(Phase.IDLE)

    def enter(self, phase: Phase) -> None:
        """Begins ``phase``; its peak starts at the bytes that are alive now."""
        self.phase = phase
        self._note_peak()

    def __enter__(self) -> "LiveTensors":
        self._resizes = resizes_told_to(self.note_resize)
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._resizes.__exit__(None, None, None)

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has let its bytes go, or has them again."""
        key, size = storage._cdata, storage.nbytes()
        if self._sizes.get(key, 0) == size:
            return
        self._remove(key)
        if size:
            self._begin(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.operate(func, types, args, kwargs or {})

    def operate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operation and counts the storages that it makes.

        Subclasses extend this one: torch would wrap each ``__torch_dispatch__``, which takes time.
        """
        if is_of_all_ranks(types):
            return NotImplemented
        result = func(*args, **kwargs)
        for leaf in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self._note_peak()
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes or storage.nbytes() == 0:
            return
        if self._host is None or not self._host.claims(tensor):
            self._begin(storage)

    def _begin(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = self._sizes[key] = storage.nbytes()
        self.current_bytes += size
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.current_bytes -= self._sizes.pop(key, 0)

    def _note_peak(self) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.current_bytes)


def is_of_all_ranks(types: Iterable[type]) -> bool:
    """True for an operation on tensors that are divided over ranks: it is asked again for what this rank does."""
    return any(kind.__name__ == "DTensor" for kind in types)


@contextmanager
def resizes_told_to(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """FSDP2 frees gathered weights by resizing their storages, which no operation tells of."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        """torch's own, and then ``note``."""
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


class CpuMeter(MemoryMeter):
    """Live tensor bytes, counted by LiveTensors."""

    kind: MeterKind = "live tensors"

    def __init__(self) -> None:
        super().__init__()
        self._tracker: LiveTensors | None = None

    @contextmanager
    def measuring(
        self, alive: Callable[[], Iterable[Tensor]], host: OtherMemory | None = None
    ) -> Iterator[None]:
        """Every operation inside is counted, which makes it slower."""
        self._tracker = tracker = LiveTensors(alive(), host)
        try:
            with tracker:
                yield
        finally:  # a step that runs out of memory was measured, too
            self._peaks = tracker.peaks
            self._tracker = None

    def enter(self, phase: Phase) -> None:
        """Does nothing outside of ``measuring``."""
        if self._tracker is not None:
            self._tracker.enter(phase)


class CudaMeter(MemoryMeter):
    """torch.cuda's peak of allocated bytes, reset at every change of phase."""

    kind: MeterKind = "cuda allocated"

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._phase: Phase | None = None

    @contextmanager
    def measuring(
        self, alive: Callable[[], Iterable[Tensor]], host: OtherMemory | None = None
    ) -> Iterator[None]:
        """torch counts by itself, so nothing is slower; ``alive`` and ``host`` are not needed."""
        self._phase = Phase.IDLE
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:  # a step that runs out of memory was measured, too
            self._note_peak()
            self._phase = None

    def enter(self, phase: Phase) -> None:
        """Does nothing outside of ``measuring``."""
        if self._phase is not None:
            self._note_peak()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._phase = phase

    def _note_peak(self) -> None:
        assert self._phase is not None
        peak = torch.cuda.max_memory_allocated(self.device)
        self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), peak)


def highest_peaks(measured: Iterable[Mapping[Phase, int]]) -> dict[Phase, int]:
    """The most bytes of each phase in what steps, or ranks, ``measured``."""
    peaks: dict[Phase, int] = {}
    for each in measured:
        for phase, size in each.items():
            peaks[phase] = max(peaks.get(phase, 0), size)
    return peaks


def memory_meter(device: torch.device) -> MemoryMeter:
    """torch's own counters on CUDA; elsewhere live tensors are counted."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def has_expandable_segments(device: torch.device) -> bool | None:
    """True if the segments that torch's allocator holds can grow; None on a CPU. The environment would not tell: it is
    read once, when a process first uses a GPU."""
    if device.type != "cuda":
        return None
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


def process_bytes(device: torch.device) -> int:
    """Bytes that the process holds beyond its tensors too: reserved bytes on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return int(psutil.Process().memory_info().rss)
