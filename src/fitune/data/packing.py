"""Rows into packs of bounded length, with little room left over."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from fitune.errors import DataError


def pack_rows(lengths: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Best-fit decreasing: the longest row first, each into the pack it fills best; a new pack if it fits in none.

    Every row is in exactly one pack, no pack holds more than ``capacity`` tokens, and equal input gives equal
    packs (of equal rows the earlier goes first). Needs at most 11/9 of the fewest packs possible, plus one
    (Johnson 1974, doi 10.1137/0203025). O(n log n) for n rows and a bounded capacity: packs with equal room are
    kept together, so the search is among at most ``capacity`` rooms.

    Raises DataError when a row is longer than a pack.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths_N, kind="stable")
    if len(order) and lengths_N[order[0]] > capacity:
        raise DataError(f"row {order[0]} has {lengths_N[order[0]]} tokens, a pack holds {capacity}")
    packs: list[list[int]] = []
    rooms: list[int] = []  # sorted, each once: how much room packs have
    packs_with: dict[int, list[int]] = {}
    for row, length in zip(order.tolist(), lengths_N[order].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            pack = packs_with[room].pop()
            if not packs_with[room]:
                del rooms[place]
        packs[pack].append(row)
        _put_back(pack, room - length, rooms, packs_with)
    return [tuple(pack) for pack in packs]


def _put_back(pack: int, room: int, rooms: list[int], packs_with: dict[int, list[int]]) -> None:
    """Remember how much room the pack has now. A full one is never looked at again."""
    if room == 0:
        return
    same = packs_with.setdefault(room, [])
    if not same:
        insort(rooms, room)
    same.append(pack)
