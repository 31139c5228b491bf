"""What happens to memory during a step, in order."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from fitune.spec.reports import Phase


class Allocated(NamedTuple):
    """A storage begins. ``size`` in bytes, as the tensor asked for it."""

    storage: Hashable
    size: int


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
