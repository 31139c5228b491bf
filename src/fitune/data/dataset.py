"""Rows of token ids on disk: written as they are made, mapped into memory when they are read."""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType

import numpy as np

_FILES = {"ids": np.dtype("<i4"), "supervised": np.dtype("?"), "offsets": np.dtype("<i8")}
_PLACES = "places"
_CHUNK = 2**20
"""Tokens, or rows, that are looked at together: what is computed over a whole dataset takes no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts computed from all tokens, stored so that they need not be read again."""

    fingerprint: str
    largest_id: int


class TokenDataset:
    """Rows of token ids end to end: ``ids`` int32 and ``supervised`` bool of shape (tokens,), ``offsets`` int64 of
    shape (stored rows + 1,): stored row i is ``ids[offsets[i]:offsets[i + 1]]``.

    ``places`` int64 of shape (rows,) says which stored row each row is; without it each has one place, in order.
    """

    def __init__(
        self,
        ids: np.ndarray,
        supervised: np.ndarray,
        offsets: np.ndarray,
        places: np.ndarray | None = None,
        facts: Facts | None = None,
    ) -> None:
        if len(offsets) < 1 or not len(ids) == len(supervised) == offsets[-1]:
            raise ValueError(
                f"{len(ids)} ids, {len(supervised)} marks and offsets to {offsets[-1:]} do not match"
            )
        self._ids, self._supervised, self._offsets, self._places = ids, supervised, offsets, places
        self._known = facts

    @classmethod
    def load(cls, folder: Path, facts: Facts | None = None) -> "TokenDataset":
        """Map the files of a DatasetWriter. Raises OSError or ValueError when they are missing or damaged."""
        ids, supervised, offsets = (
            np.memmap(folder / name, dtype, mode="r") for name, dtype in _FILES.items()
        )
        has_places = (folder / _PLACES).exists()
        places = np.memmap(folder / _PLACES, _FILES["offsets"], mode="r") if has_places else None
        return cls(ids, supervised, offsets, places, facts)

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._places is None else len(self._places)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (int32) and supervised marks (bool) of one row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        stored = index if self._places is None else self._places[index]
        begin, end = self._offsets[stored], self._offsets[stored + 1]
        return self._ids[begin:end], self._supervised[begin:end]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, int64."""
        return self._placed(np.diff(self._offsets))

    @cached_property
    def labels_per_row(self) -> np.ndarray:
        """Supervised tokens of every row that something stands before: a row's first token is never predicted."""
        counts = np.empty(len(self._offsets) - 1, np.int64)
        first = 0
        while first < len(counts):  # rows of about _CHUNK tokens
            past = int(np.searchsorted(self._offsets, self._offsets[first] + _CHUNK, side="right"))
            last = max(first + 1, min(past - 1, first + _CHUNK))
            begins = np.asarray(self._offsets[first:last])
            marks = self._supervised[begins[0] : self._offsets[last]]
            begins = begins - begins[0]
            counts[first:last] = np.add.reduceat(marks, begins, dtype=np.int64) - marks[begins]
            first = last
        return self._placed(counts)

    def _placed(self, of_stored: np.ndarray) -> np.ndarray:
        return of_stored if self._places is None else of_stored[self._places]

    @cached_property
    def largest_id(self) -> int:
        """-1 without any."""
        if self._known is not None:
            return self._known.largest_id
        return max((int(part.max()) for part in _chunks(self._ids)), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every id, mark and offset, each row in each of its places: a resumed run must go on with the
        same rows."""
        if self._known is not None:
            return self._known.fingerprint
        digest = hashlib.blake2b(digest_size=16)
        for array in (self._ids, self._supervised):
            for part in _chunks(array) if self._places is None else self._in_places(array):
                digest.update(np.ascontiguousarray(part).data)
        for part in _chunks(self._offsets) if self._places is None else self._offsets_in_places():
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @property
    def facts(self) -> Facts:
        """Fingerprint and largest id; both read all tokens unless they are known."""
        return Facts(fingerprint=self.fingerprint, largest_id=self.largest_id)

    def _in_places(self, array: np.ndarray) -> Iterator[np.ndarray]:
        for places in _chunks(self._places, size=1024):
            yield np.concatenate([array[self._offsets[i] : self._offsets[i + 1]] for i in places.tolist()])

    def _offsets_in_places(self) -> Iterator[np.ndarray]:
        total = 0
        yield np.zeros(1, np.int64)
        for lengths in _chunks(self.lengths):
            yield np.cumsum(lengths) + total
            total += int(lengths.sum())


def _chunks(array: np.ndarray | None, *, size: int = _CHUNK) -> Iterator[np.ndarray]:
    if array is not None:
        for begin in range(0, len(array), size):
            yield np.asarray(array[begin : begin + size])


class DatasetWriter:
    """Writes the files of a TokenDataset into ``folder``, batch by batch. Raises OSError.

    A context manager: the files are complete after it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self._open = folder, ExitStack()
        self._files = {name: self._open.enter_context((folder / name).open("wb")) for name in _FILES}
        self._files["offsets"].write(np.zeros(1, np.int64).tobytes())
        self._tokens = self._rows = 0
        self.places = 0
        """Rows of the dataset, each as often as it is repeated."""

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, ids: np.ndarray, supervised: np.ndarray, lengths: np.ndarray, repeats: np.ndarray) -> None:
        """Rows of ``lengths`` end to end. ``repeats`` of shape (examples, 2): (rows of the example, its places)."""
        self._files["ids"].write(ids.astype("<i4", copy=False).tobytes())
        self._files["supervised"].write(supervised.tobytes())
        self._files["offsets"].write((self._tokens + np.cumsum(lengths)).astype("<i8").tobytes())
        if _PLACES not in self._files and (repeats[:, 1] != 1).any():
            self._files[_PLACES] = self._open.enter_context((self._folder / _PLACES).open("wb"))
            for begin in range(0, self._rows, _CHUNK):
                self._place(np.arange(begin, min(begin + _CHUNK, self._rows)))
        if _PLACES in self._files:
            self._repeat(repeats)
        self.places += int((repeats[:, 0] * repeats[:, 1]).sum())
        self._tokens += int(lengths.sum())
        self._rows += len(lengths)

    def _repeat(self, repeats: np.ndarray) -> None:
        row = self._rows
        for rows, times in repeats.tolist():
            together = max(1, _CHUNK // max(rows, 1))
            for begin in range(0, times, together):
                self._place(np.tile(np.arange(row, row + rows), min(together, times - begin)))
            row += rows

    def _place(self, rows: np.ndarray) -> None:
        self._files[_PLACES].write(rows.astype("<i8").tobytes())
