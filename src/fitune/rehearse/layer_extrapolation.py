"""Layer extrapolation, from a shallow model's step to a deep one's: blocks in the middle of a row do all the same.

Memory is affine in depth, but its peak is not, as it moves from one moment to another. So not the peak is
extrapolated but the step itself: what happens in one block is repeated for each that the shallow model lacks. Both
rows of blocks, the recomputed and the others, keep their first two and last two, where neighbours differ.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fitune.rehearse.trace import (
    Allocated,
    Entered,
    Event,
    Freed,
    Reached,
    Trace,
)
from fitune.values.predictions import Phase

ROW = 5
"""Blocks that stand for a longer row: two at each end, and the one in the middle that is repeated."""
_MIDDLE = 2


class Irregular(Exception):
    """The blocks of this model do not repeat; it has to be traced whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Blocks of a model: the recomputed ones first, then those that keep everything."""

    recomputed: int
    kept: int

    @property
    def layers(self) -> int:
        """All blocks."""
        return self.recomputed + self.kept

    def shallow(self) -> "Depth":
        """Returns the depth with at most ROW recomputed and ROW kept blocks."""
        return Depth(recomputed=min(self.recomputed, ROW), kept=min(self.kept, ROW))

    def copies(self, shallow_block: int) -> range:
        """The blocks of this depth that block ``shallow_block`` of the shallow model stands for."""
        small = self.shallow()
        start, length, block = 0, self.recomputed, shallow_block
        if block >= small.recomputed:
            start, length, block = self.recomputed, self.kept, block - small.recomputed
        if length <= ROW or block < _MIDDLE:
            return range(start + block, start + block + 1)
        if block > _MIDDLE:
            last = start + length - (ROW - block)
            return range(last, last + 1)
        return range(start + _MIDDLE, start + length - _MIDDLE)

    def stood_for_by(self, block: int | None) -> int | None:
        """The shallow model's block that stands for ``block``."""
        if block is None:
            return None
        return next(b for b in range(self.shallow().layers) if block in self.copies(b))


class Place(NamedTuple):
    """Part of the step: one direction through one block, or between blocks (``block`` None)."""

    turn: int
    """Forward and backward passes so far: LOMO may go back twice."""
    direction: str
    block: int | None


class Name(NamedTuple):
    """A storage by where it began, so that the copies of a block can speak of their own."""

    place: Place
    ordinal: int


def extrapolated(shallow: Trace, update: Trace, depth: Depth) -> Trace:
    """The deep model's step, of the shallow one's forward and backward and the deep one's own update.

    Raises Irregular when a middle block does not do what its neighbours do.
    """
    segments = _segments(shallow)
    names = {
        event.storage: Name(place, ordinal)
        for place, events in segments
        for ordinal, event in enumerate(e for e in events if isinstance(e, Allocated))
    }
    _check_repeats(segments, depth)
    trace = Trace(resident={k: v for k, v in update.resident.items() if v[0] not in ("gradients", "batch")})
    trace.resident |= {("shallow", k): v for k, v in shallow.resident.items() if v[0] == "batch"}
    begun: dict[Name, int] = {}
    for place, events, block in _in_order(segments, depth):
        shift = _Shift(names, depth, place.block, block)
        here = place._replace(block=block)
        ordinal = 0
        for event in events:
            match event:
                case Allocated(storage=storage, size=size, stream=stream):
                    name = Name(here, ordinal)
                    ordinal += 1
                    begun[name] = size
                    trace.events.append(Allocated(name, size, stream))
                    if storage in shallow.gradients:
                        of, parameter = shallow.gradients[storage]
                        trace.gradients[name] = (shift.of(of), parameter)
                case Freed(storage=storage):
                    name = shift.name(storage)
                    if begun.pop(name, None) is None:
                        raise Irregular(f"{name} is freed where it does not exist")
                    trace.events.append(Freed(name))
                case Entered():
                    trace.events.append(event)
    _append_update(trace, update)
    return trace


@dataclass(frozen=True, slots=True)
class _Shift:
    """Speaks of a shallow block's storages as those of the block that it stands for."""

    names: dict[Hashable, Name]
    depth: Depth
    shallow_block: int | None
    block: int | None

    def name(self, storage: Hashable) -> Name:
        """Raises Irregular for a storage that did not begin in this step."""
        if storage not in self.names:
            raise Irregular("something from before the step is freed in it")
        name = self.names[storage]
        return name._replace(place=name.place._replace(block=self.of(name.place.block)))

    def of(self, other: int | None) -> int | None:
        """The block that ``other`` means, seen from here: a neighbour stays a neighbour."""
        if other is None:
            if self._repeats(self.shallow_block):
                raise Irregular("a repeated block frees something that exists once")
            return None
        copies = self.depth.copies(other)
        if len(copies) == 1 and not self._repeats(self.shallow_block):
            return copies[0]
        if self.shallow_block is None or self.block is None or abs(other - self.shallow_block) > 1:
            raise Irregular("a block that is repeated is spoken of from afar")
        return self.block + other - self.shallow_block

    def _repeats(self, block: int | None) -> bool:
        return block is not None and len(self.depth.copies(block)) > 1


def _segments(trace: Trace) -> list[tuple[Place, list[Event]]]:
    """The step cut where it reaches a block; without its update."""
    turn = -1
    segments: list[tuple[Place, list[Event]]] = []
    for event in trace.events:
        if isinstance(event, Entered) and event.phase is Phase.UPDATE:
            break
        if isinstance(event, Entered):
            turn += event.phase in (Phase.FORWARD, Phase.BACKWARD)
            segments.append((Place(turn, f"enter {event.phase.value}", None), [event]))
        elif isinstance(event, Reached):
            segments.append((Place(turn, event.direction, event.block), []))
        elif segments:
            segments[-1][1].append(event)
    return segments


def _check_repeats(segments: list[tuple[Place, list[Event]]], depth: Depth) -> None:
    """A middle block and its two neighbours begin the same storages in the same order."""
    begun = {place: [e.size for e in events if isinstance(e, Allocated)] for place, events in segments}
    for place, sizes in begun.items():
        if place.block is None or len(depth.copies(place.block)) == 1:
            continue
        for neighbour in (place.block - 1, place.block + 1):
            if begun.get(place._replace(block=neighbour)) != sizes:
                raise Irregular(f"block {neighbour} is not like block {place.block} ({place.direction})")


def _in_order(
    segments: list[tuple[Place, list[Event]]], depth: Depth
) -> Iterator[tuple[Place, list[Event], int | None]]:
    """Every part of the deep model's step with the block it is of; backward goes down."""
    for place, events in segments:
        if place.block is None:
            yield place, events, None
            continue
        copies = depth.copies(place.block)
        for block in copies if place.direction == "forward" else reversed(copies):
            yield place, events, block


def _append_update(trace: Trace, update: Trace) -> None:
    """The update's gradients are those that backward left."""
    left = {key: name for name, key in trace.gradients.items()}
    same: dict[Hashable, Hashable] = {s: left[key] for s, key in update.gradients.items()}
    for event in update.events:
        match event:
            case Allocated(storage=storage, size=size):
                trace.events.append(Allocated(("update", storage), size))
            case Freed(storage=storage):
                trace.events.append(Freed(same.get(storage, ("update", storage))))
            case _:
                trace.events.append(event)
