"""BlockProfile: what one kind of decoder block keeps, needs and moves for a micro-batch of one BatchShape.

Memory and time ask nothing else of a block, and nothing else of the data.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fitune.spec.model.model_spec import BlockAttention

IGNORED = -100
"""The label of a position at which nothing is learned; torch's cross-entropy skips it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """One micro-batch: a flat stream of ``tokens`` made of ``rows`` rows that do not see one another.

    ``supervised_tokens`` of them have a label; only these pass the head.
    """

    tokens: int
    supervised_tokens: int
    rows: int
    longest_row: int = 0
    """Tokens; 0 when all rows are equally long."""
    row_lengths: tuple[int, ...] = ()
    """Tokens of each row; empty when all are as long as the longest."""

    @classmethod
    def of_rows(cls, lengths: Sequence[int], *, supervised_tokens: int) -> "BatchShape":
        """The shape of rows with these lengths."""
        return cls(
            tokens=sum(lengths),
            supervised_tokens=supervised_tokens,
            rows=len(lengths),
            longest_row=max(lengths),
            row_lengths=tuple(lengths),
        )

    @classmethod
    def of_average(
        cls, *, rows: float, tokens: int, squares: float, supervised_tokens: int, share: float
    ) -> "BatchShape":
        """The ``share`` of a dataset that a micro-batch of average size holds; ``squares``: Σ n² over its rows."""
        return cls(
            tokens=max(1, round(tokens * share)),
            supervised_tokens=round(supervised_tokens * share),
            rows=max(1, round(rows * share)),
            longest_row=round(squares / tokens),
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.longest_row or -(-self.tokens // self.rows)

    def pairs(self, *, in_rows_over: int = 0) -> int:
        """Σ n² over the rows of n tokens; of those alone that are longer than ``in_rows_over``."""
        if self.row_lengths:
            return sum(n * n for n in self.row_lengths if n > in_rows_over)
        return self.tokens * self.row_tokens if self.row_tokens > in_rows_over else 0

    def seen_pairs(self, sees: BlockAttention) -> float:
        """Pairs of all rows, each token with half of itself: Σ n²/2 of rows of n tokens without a window."""
        rows = [(n, 1.0) for n in self.row_lengths] or [(self.row_tokens, self.tokens / self.row_tokens)]
        return sum(times * (sees.pairs(n) - n / 2) for n, times in rows)

    def rows_going_back(self) -> Iterator[tuple[int, int]]:
        """Yields, from the last row to the first, its n tokens and Σ m² of the rows behind it, of m tokens each, whose
        backward is over."""
        gone = 0
        for n in reversed(self.row_lengths or (self.row_tokens,)):
            yield n, gone
            gone += n * n

    def tokens_in_rows_over(self, length: int) -> int:
        """Tokens of the rows that are longer than ``length``."""
        if self.row_lengths:
            return sum(n for n in self.row_lengths if n > length)
        return self.tokens if self.row_tokens > length else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One moment of a block. Bytes.

    ``kept``: held by autograd from this stage's forward until its backward.
    ``forward``: alive at the worst moment of its forward when nothing is kept (a recomputed block).
    ``again``: alive at the worst moment of its forward when a recomputed block runs again, beyond what this and
    earlier stages keep; 0 where going back takes more.
    ``making``: alive at the worst moment of a forward that keeps, beyond what this and earlier stages keep; 0 where the
    block's end holds more.
    ``backward``: alive at the worst moment of its backward, beyond what this and earlier stages keep and
    beyond the gradients of parameters; negative when more is let go than made.
    ``gradients``: gradients of the parameters trained in this stage; ``largest_gradient`` of one of them.
    """

    name: str
    kept: int
    forward: int
    backward: int
    again: int = 0
    making: int = 0
    incoming: int = 0
    """Bytes, among ``again``, of the gradient that waits, which a first forward does not have."""
    gradients: int = 0
    largest_gradient: int = 0
    backward_holding: int = 0
    """``backward`` of a plan that goes back twice, beyond all that its block keeps: the first lets go of nothing."""


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
    """FLOPs of all heads, forward and backward, for each pair of a query and a key."""
    sees: BlockAttention
    """Without a window where the kernel goes through whole rows, under a mask."""
    over: Literal["rows", "written rows", "written stream"]
    """Fused kernels compute half of each row's square; written scores are the whole, of each row or of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPeak:
    """The worst moment of going back through some stages."""

    kept: int
    gradients: int
    temporaries: int

    @property
    def total(self) -> int:
        """Bytes of the three together."""
        return self.kept + self.gradients + self.temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedMemory:
    """Bytes of a block that was traced, for one BatchShape; fields as in TracedBlock."""

    kept: int
    gradients: int
    forward: int
    building: int
    backward: BackwardPeak
    adding: BackwardPeak
    recomputed: BackwardPeak
    recomputed_adding: BackwardPeak
    leaves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """Bytes and work of a block for one micro-batch: every architecture and way of training is one such value."""

    stages: tuple[Stage, ...]
    """In the order they run; backward visits them in reverse. Empty for a traced block."""
    forward: Pass
    backward: Pass
    attention: Attention
    traced: TracedMemory | None = None


def in_all(passes: Iterable[tuple[Pass, int]]) -> Pass:
    """The sum of each pass so many times."""
    total = Pass()
    for each, times in passes:
        total = total.plus(each, times=times)
    return total
