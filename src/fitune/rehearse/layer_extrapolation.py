"""Layer extrapolation, from a shallow model's step to a deep one's: blocks in the middle of a row do all the same.

Memory is affine in depth, but its peak is not, as it moves from one moment to another. So not the peak is
extrapolated but the step itself: what happens in one block is repeated for each that the shallow model lacks. Both
rows of blocks, the recomputed and the others, keep their first two and last two, where neighbours differ.

The optimizer sees parameters and no blocks: for its update those that stand for others are repeated, not built.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fitune.engine.protocol import Engine
from fitune.engine.ranks import local_part
from fitune.models.language_model import LanguageModel
from fitune.rehearse.recorder import Recorder
from fitune.rehearse.stand_ins import StandIns
from fitune.rehearse.trace import (
    Allocated,
    Entered,
    Event,
    Freed,
    ParameterKey,
    Reached,
    Trace,
)
from fitune.spec.plan import Plan, updates_in_backward
from fitune.spec.predictions import Phase
from fitune.train.prepare import engine_for

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
        return self.recomputed + self.kept

    def shallow(self) -> "Depth":
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
                        trace.gradients[name] = shift.parameter(shallow.gradients[storage])
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
        if storage not in self.names:
            raise Irregular("something from before the step is freed in it")
        name = self.names[storage]
        return name._replace(place=name.place._replace(block=self.of(name.place.block)))

    def parameter(self, key: ParameterKey) -> ParameterKey:
        return (self.of(key[0]), key[1])

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


Keyed = tuple[ParameterKey, Tensor]


def record_update(plan: Plan, shallow: LanguageModel, depth: Depth) -> Trace:
    """The update of ``plan``'s model, of which ``shallow`` has a few blocks.

    Its gradients, weights and states are among what is resident.
    """
    weights = dict(_deepened(_parameters(shallow), depth))
    trained = {key: p for key, p in weights.items() if isinstance(p, Parameter) and p.requires_grad}
    engine = engine_for(plan, shallow, {_flat_name(key): p for key, p in trained.items()})
    make_states(plan, engine, trained.values())
    if not updates_in_backward(plan.tuning):
        _share_gradients(trained, dict(_parameters(shallow)), depth)
    resident: dict[str, Iterable[Tensor]] = {
        "weights": [*weights.values(), *(buffer for _, buffer in _deepened(_buffers(shallow), depth))],
        "optimizer": map(local_part, engine.state().tensors.values()),
        "gradients": (p.grad for p in trained.values() if p.grad is not None),  # a list would keep them alive
    }
    recorder = Recorder(resident, StandIns(gpu=plan.hardware.gpu, supervised_tokens=1))
    recorder.name_gradients((key, p.grad) for key, p in trained.items())
    with recorder:
        engine.update(learning_rate=1.0, enter_phase=recorder.enter)
        return recorder.finished()


def make_states(plan: Plan, engine: Engine, trained: Iterable[Tensor]) -> None:
    """An update on gradients of no content: the optimizer makes its states as in a first step."""
    _set_gradients(trained)
    with Recorder({}, StandIns(gpu=plan.hardware.gpu, supervised_tokens=1)):
        engine.update(learning_rate=1.0, enter_phase=lambda phase: None)


def parameter_keys(model: LanguageModel) -> dict[int, ParameterKey]:
    """id of a parameter -> its block and its name there."""
    return {id(parameter): key for key, parameter in _parameters(model)}


def _set_gradients(trained: Iterable[Tensor]) -> None:
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)


def _share_gradients(
    trained: Mapping[ParameterKey, Parameter], shallow: Mapping[ParameterKey, Tensor], depth: Depth
) -> None:
    """Gradients of no content; where the shallow model's share a storage, as FSDP2's of a block do, so do these."""
    storages: dict[tuple[int | None, int], Tensor] = {}
    for (block, name), parameter in trained.items():
        example = shallow[depth.stood_for_by(block), name].grad
        assert example is not None
        local = local_part(example)
        whole = local.untyped_storage()
        place = (block, whole._cdata)
        if place not in storages:
            storages[place] = parameter.new_empty(whole.nbytes() // local.element_size(), dtype=local.dtype)
        parameter.grad = storages[place].as_strided(local.shape, local.stride(), local.storage_offset())


def _parameters(model: LanguageModel) -> Iterator[Keyed]:
    """Trained parameters in the order in which training hands them to the optimizer."""
    return _by_block(model, lambda module: module.named_parameters())


def _buffers(model: LanguageModel) -> Iterator[Keyed]:
    return _by_block(model, lambda module: module.named_buffers())


def _by_block(
    model: LanguageModel, members: Callable[[Module], Iterable[tuple[str, Tensor]]]
) -> Iterator[Keyed]:
    inside = {
        id(tensor): (index, name)
        for index, block in enumerate(model.blocks)
        for name, tensor in members(block)
    }
    for name, tensor in members(model.whole):
        yield inside.get(id(tensor), (None, name)), tensor


def _deepened(shallow: Iterable[Keyed], depth: Depth) -> Iterator[Keyed]:
    """New tensors of the same shapes, those of a block that stands for others once for each of them."""
    for block, group in itertools.groupby(shallow, key=lambda item: item[0][0]):
        members = [(name, tensor) for (_, name), tensor in group]
        for copy in [None] if block is None else depth.copies(block):
            yield from (((copy, name), _empty_like(tensor)) for name, tensor in members)


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(local_part(tensor), requires_grad=False)
    return Parameter(empty, tensor.requires_grad) if isinstance(tensor, Parameter) else empty


def _flat_name(key: ParameterKey) -> str:
    return f"{key[0]}.{key[1]}"
