"""Events of memory during a step, in order, and the bytes alive at the worst moment of each phase, by kind."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from fitune.spec.reports import Phase


class Allocated(NamedTuple):
    """A storage begins. ``size`` in bytes, as the tensor asked for it; ``stream`` 0 is the one that computes."""

    storage: Hashable
    size: int
    stream: int = 0


class Freed(NamedTuple):
    """Python and autograd have let go of a storage."""

    storage: Hashable


class Entered(NamedTuple):
    """The step passes into another phase."""

    phase: Phase


class Reached(NamedTuple):
    """The step reaches a decoder block: ``forward`` before it runs, ``backward`` when its output has a gradient.

    After the last block's forward, ``block`` is None.
    """

    direction: str
    block: int | None


Event = Allocated | Freed | Entered | Reached

ParameterKey = tuple[int | None, str]
"""A parameter by the index of its block (None outside of the blocks) and its name there."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """One step: what existed before it, and what happened."""

    resident: dict[Hashable, tuple[str, int]] = field(default_factory=dict)
    """Storage -> kind (weights, optimizer, batch) and bytes."""
    events: list[Event] = field(default_factory=list)
    gradients: dict[Hashable, ParameterKey] = field(default_factory=dict)
    """Storages that ended up as the gradient of a parameter."""


BLOCK = 512
"""The caching allocator hands out multiples of this; max_memory_allocated counts them (CUDACachingAllocator.cpp)."""


def rounded(size: int, *, on_cuda: bool) -> int:
    return -(-size // BLOCK) * BLOCK if on_cuda else size


def kinds_of(trace: Trace) -> dict[Hashable, str]:
    """The kind of each storage.

    ``activations`` outlive the forward pass, ``loss`` begins in the loss, ``gradients`` end up on parameters;
    everything else is ``temporaries``, what a recomputed block makes again among them.
    """
    kinds: dict[Hashable, str] = {storage: kind for storage, (kind, _) in trace.resident.items()}
    phase = Phase.IDLE
    alive: set[Hashable] = set()
    for event in trace.events:
        match event:
            case Entered(phase=entered):
                if phase is Phase.FORWARD and entered is not phase:
                    kinds.update(dict.fromkeys(alive, "activations"))
                phase, alive = entered, set()
            case Allocated(storage=storage):
                kinds[storage] = "loss" if phase is Phase.LOSS else "temporaries"
                if phase is Phase.FORWARD:
                    alive.add(storage)
            case Freed(storage=storage):
                alive.discard(storage)
    kinds.update(dict.fromkeys(trace.gradients, "gradients"))
    return kinds


def peaks_by_kind(trace: Trace, *, on_cuda: bool) -> dict[Phase, dict[str, int]]:
    """Bytes alive at the worst moment of each phase. IDLE: what is there when the step begins."""
    kinds = kinds_of(trace)
    sizes = {storage: rounded(size, on_cuda=on_cuda) for storage, (_, size) in trace.resident.items()}
    alive: Counter[str] = Counter()
    for storage, size in sizes.items():
        alive[kinds[storage]] += size
    total = sum(sizes.values())
    batch = alive["batch"]
    worst = {Phase.IDLE: (total - batch, {kind: size for kind, size in alive.items() if kind != "batch"})}
    phase = Phase.IDLE
    for event in trace.events:
        match event:
            case Entered(phase=phase):
                pass
            case Allocated(storage=storage, size=asked):
                size = sizes[storage] = rounded(asked, on_cuda=on_cuda)
                alive[kinds[storage]] += size
                total += size
            case Freed(storage=storage):
                size = sizes.pop(storage)
                alive[kinds[storage]] -= size
                total -= size
            case _:
                continue
        if phase not in worst or total > worst[phase][0]:
            worst[phase] = (total, dict(alive))
    return {
        phase: {kind: size for kind, size in terms.items() if size} for phase, (_, terms) in worst.items()
    }
