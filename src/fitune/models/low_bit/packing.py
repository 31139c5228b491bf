"""Which weights of a block are packed, and what takes their place: linears, and the stacked matrices of experts.

Embedding, head, norms, biases and routers stay in the compute type.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fitune.models.experts import STACKS, hold_packed, is_experts
from fitune.models.low_bit.quantised import (
    PackedWeight,
    is_dense_linear,
    is_read_by_kernels,
    packed_linear,
    packed_stack,
)
from fitune.spec.plan import Dense, Quantiser


@dataclass(frozen=True, slots=True)
class Place(ABC):
    """A dense weight in a model, and the packed one that takes its place."""

    parent: nn.Module
    name: str
    """The name of the linear, or of the parameter, in ``parent``."""

    @property
    @abstractmethod
    def dense(self) -> Tensor:
        """The weight as it is now."""

    @abstractmethod
    def packed(self, weight: Tensor, base: Quantiser) -> PackedWeight:
        """``weight`` in few bits."""

    @abstractmethod
    def take(self, packed: PackedWeight) -> None:
        """Put ``packed`` there."""


class _Linear(Place):
    __slots__ = ()

    @property
    def linear(self) -> nn.Module:
        return self.parent.get_submodule(self.name)

    @property
    def dense(self) -> Tensor:
        weight = self.linear.weight
        assert isinstance(weight, Tensor)
        return weight

    def packed(self, weight: Tensor, base: Quantiser) -> PackedWeight:
        return packed_linear(self.linear, weight, base)

    def take(self, packed: PackedWeight) -> None:
        packed.bias = self.linear.bias
        setattr(self.parent, self.name, packed.train(self.linear.training))


class _Stack(Place):
    __slots__ = ()

    @property
    def dense(self) -> Tensor:
        return self.parent.get_parameter(self.name)

    def packed(self, weight: Tensor, base: Quantiser) -> PackedWeight:
        return packed_stack(weight, base)

    def take(self, packed: PackedWeight) -> None:
        hold_packed(self.parent, self.name, packed)


def places_in(block: nn.Module, base: Dense | Quantiser) -> Iterator[tuple[str, Place]]:
    """Name in ``block`` and place of each weight that ``base`` packs."""
    if isinstance(base, Dense):
        return
    for name, module in block.named_modules():
        before = f"{name}." if name else ""
        for child_name, child in module.named_children():
            if is_dense_linear(child) and not is_read_by_kernels(module, child_name):
                yield f"{before}{child_name}.weight", _Linear(module, child_name)
        if base.stack is not None and is_experts(module):
            for stack in STACKS:
                if module._parameters.get(stack) is not None:
                    yield f"{before}{stack}", _Stack(module, stack)


def quantise_blocks(blocks: nn.Module, base: Dense | Quantiser) -> None:
    """Replace every weight that ``base`` packs; each dense one is let go of before the next is packed."""
    if isinstance(base, Dense):
        return
    for _, place in list(places_in(blocks, base)):
        place.take(place.packed(place.dense.detach(), base))
