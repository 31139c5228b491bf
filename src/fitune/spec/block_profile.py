"""BlockProfile: what one kind of decoder block keeps, needs and moves. Memory and time ask nothing else of a block."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One moment of a block. Bytes.

    ``kept``: held by autograd from this stage's forward until its backward.
    ``forward``: alive at the worst moment of its forward when nothing is kept (a recomputed block).
    ``again``: alive at the worst moment of its forward when a recomputed block runs again, beyond what this and
    earlier stages keep; 0 where going back takes more.
    ``backward``: alive at the worst moment of its backward, beyond what this and earlier stages keep and
    beyond the gradients of parameters; negative when more is let go than made.
    ``gradients``: gradients of the parameters trained in this stage; ``largest_gradient`` of one of them.
    """

    name: str
    kept: int
    forward: int
    backward: int
    again: int = 0
    gradients: int = 0
    largest_gradient: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Per token: FLOPs of products and bytes of elementwise operations. At all: products and other operations."""

    flops: float = 0.0
    bytes: float = 0.0
    products: int = 0
    operations: int = 0

    def plus(self, other: "Pass", *, times: int) -> "Pass":
        """This one and ``times`` the other."""
        return Pass(
            flops=self.flops + times * other.flops,
            bytes=self.bytes + times * other.bytes,
            products=self.products + times * other.products,
            operations=self.operations + times * other.operations,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The heads of one block, and what they are computed over."""

    heads: int
    head_size: int
    flops_per_pair: float
    """Of all heads, forward and backward, for each pair of a query and a key."""
    over: Literal["rows", "written rows", "written stream"]
    """Fused kernels compute half of each row's square; written scores are the whole, of each row or of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """Of one micro-batch. Every architecture, and every way of training a block, is one of these values."""

    stages: tuple[Stage, ...]
    """In the order they run; backward visits them in reverse."""
    forward: Pass
    backward: Pass
    attention: Attention


def in_all(passes: Iterable[tuple[Pass, int]]) -> Pass:
    """The sum of each pass so many times."""
    total = Pass()
    for each, times in passes:
        total = total.plus(each, times=times)
    return total
