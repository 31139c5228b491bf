"""Packs of rows: bounded length, with little room left over. N is the number of rows of the dataset."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import overload

import numpy as np

from fitune.errors import DataError

_CHUNK = 2**16
"""Rows that are Python's integers at a time: as such they take ten times the memory of an array."""


class Packs(Sequence[tuple[int, ...]]):
    """Packs as tuples of row numbers. Memory: eight bytes for a row and eight for a pack."""

    def __init__(self, rows_N: np.ndarray, starts: np.ndarray) -> None:
        self.rows_N, self.starts = rows_N, starts
        """Rows of all packs end to end; pack i begins at ``starts[i]``, and the last start is where the last ends."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, pack: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, pack: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, pack: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(pack, slice):
            return [self[i] for i in range(*pack.indices(len(self)))]
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        return tuple(self.rows_N[self.starts[pack] : self.starts[pack + 1]].tolist())

    def sums(self, sizes_N: np.ndarray) -> np.ndarray:
        """The sum of a size in every pack, given that of every row."""
        ends = np.concatenate([[0], np.cumsum(sizes_N[self.rows_N])])
        return ends[self.starts[1:]] - ends[self.starts[:-1]]


def pack_rows(lengths: Sequence[int] | np.ndarray, capacity: int) -> Packs:
    """Best-fit decreasing: the longest row first, each into the pack it fills best; a new pack if it fits in none.

    Every row is in exactly one pack, no pack holds more than ``capacity`` tokens, and equal input gives equal
    packs (of equal rows the earlier goes first). Needs at most 11/9 of the fewest packs possible, plus one
    (Johnson 1974, doi 10.1137/0203025). O(n log n) for n rows and a bounded capacity: packs with equal room are
    kept together, so the search is among at most ``capacity`` rooms.

    Raises DataError when a row is longer than a pack.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    order_N = np.argsort(-lengths_N, kind="stable")
    if len(order_N) and lengths_N[order_N[0]] > capacity:
        raise DataError(f"row {order_N[0]} has {lengths_N[order_N[0]]} tokens, a pack holds {capacity}")
    pack_N = np.empty(len(order_N), np.int64)
    rooms = _Rooms(capacity, most_packs=len(order_N))
    for begin in range(0, len(order_N), _CHUNK):
        chosen = order_N[begin : begin + _CHUNK]
        pack_N[begin : begin + _CHUNK] = list(map(rooms.place, lengths_N[chosen].tolist()))
    by_pack_N = np.argsort(pack_N, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(pack_N, minlength=rooms.packs))])
    return Packs(order_N[by_pack_N], starts.astype(np.int64))


def packs_of_examples(rows: int, example_rows: int) -> Packs:
    """The rows of each example, which stand one behind the other, as a pack."""
    return Packs(np.arange(rows), np.arange(0, rows + 1, example_rows))


class _Rooms:
    """Packs by the room they have left: of equal room the one that got it last is taken first."""

    def __init__(self, capacity: int, *, most_packs: int) -> None:
        self.packs = 0
        self._capacity = capacity
        self._rooms: list[int] = []
        """Sorted, each once."""
        self._newest: dict[int, int] = {}
        """Room -> the pack that got it last; ``_before`` of a pack is the one that had its room before, or -1."""
        self._before = np.full(most_packs, -1, np.int64)

    def place(self, length: int) -> int:
        """The pack into which a row of ``length`` goes."""
        at = bisect_left(self._rooms, length)
        if at == len(self._rooms):
            pack, room = self.packs, self._capacity
            self.packs += 1
        else:
            room = self._rooms[at]
            pack = self._newest[room]
            before = int(self._before[pack])
            if before < 0:
                del self._newest[room], self._rooms[at]
            else:
                self._newest[room] = before
        room -= length
        if room:  # a full pack is never looked at again
            before = self._newest.get(room, -1)
            if before < 0:
                insort(self._rooms, room)
            self._before[pack] = before
            self._newest[room] = pack
        return pack
