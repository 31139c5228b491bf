"""BlockProfile: what one kind of decoder block keeps, needs and moves for a micro-batch of one BatchShape.

Memory and time ask nothing else of a block, and nothing else of the data. TracedStep: what tracing found of a model's
blocks, from which such profiles are made without torch. Its sizes are polynomials in the tokens of a micro-batch, so
that one trace stands for all lengths of rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fitune.values.model.model_spec import BlockAttention

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
    ``gradients``: gradients of the parameters trained in this stage; ``largest_gradient`` of one of them; ``stepped``
    where it is stepped in backward: the gradient and the step, less what is let go of by then.
    """

    name: str
    kept: int = 0
    forward: int = 0
    backward: int = 0
    again: int = 0
    making: int = 0
    incoming: int = 0
    """Bytes, among ``again``, of gradients that wait, which a first forward does not have."""
    gone_again: int = 0
    """Bytes of ``backward`` by which it is less in a block that ran again, which lets go of what it kept earlier."""
    gradients: int = 0
    largest_gradient: int = 0
    stepped: int = 0
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
    over: Literal["rows", "written rows", "stream"]
    """Fused kernels compute half of each row's square; written scores are all of it, under a mask the stream's."""


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
class Block:
    """Bytes of one block for one micro-batch, its stages in sum: all that the timeline asks of it."""

    kept: int
    gradients: int
    forward: int
    """The worst moment of its forward when nothing is kept."""
    building: int
    """The worst moment of its forward while what autograd keeps piles up."""
    peak: BackwardPeak
    recomputed_peak: BackwardPeak
    """The worst moment of its backward when its forward runs again first."""
    leaves: int = 0
    """Bytes that it leaves beyond an input of one hidden state when it is to run again (TracedBlock)."""


class TracedBackward(NamedTuple):
    """Bytes of a traced block, by what its backward does with gradients."""

    making: Block
    """There are none yet."""
    adding: Block
    """They are added to those of earlier micro-batches, or stepped."""
    measuring: Block
    """They are measured and let go of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """Bytes and work of a block for one micro-batch: every architecture and way of training is one such value."""

    stages: tuple[Stage, ...]
    """In the order they run; backward visits them in reverse. Empty for a traced block."""
    forward: Pass
    backward: Pass
    attention: Attention
    traced: TracedBackward | None = None
    """A traced block's bytes, which has no stages; None for a block of formulas."""


def in_all(passes: Iterable[tuple[Pass, int]]) -> Pass:
    """The sum of each pass so many times."""
    total = Pass()
    for each, times in passes:
        total = total.plus(each, times=times)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A micro-batch as sizes see it: t tokens, Σ n², and by how much both grow with rows padded to whole chunks."""

    tokens: int
    square: int
    padding: int = 0
    padding_square: int = 0
    padded_tokens: int = 0
    """t where a row is padded at all, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes (or FLOPs, where a field says so): constant + per_token · t + per_square · Σ n² + those of padding.

    ``TracedStep.squares_stream`` says whether n are the rows' lengths or the stream's.
    """

    constant: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0
    per_padding: float = 0.0
    """For each token by which state-space mixers lengthen rows to whole chunks."""
    per_padding_square: float = 0.0
    per_padded_token: float = 0.0
    """For each token of a row that is copied because it is padded."""

    def plus(self, other: "Size") -> "Size":
        """The sum of both."""
        return Size(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def exceeds(self, other: "Size") -> bool:
        """True if it is at least the other for every micro-batch."""
        return all(getattr(self, name) >= getattr(other, name) for name in self.__slots__)

    def at(self, extent: Extent) -> int:
        """The value for a micro-batch of that extent."""
        whole = self.constant + self.per_token * extent.tokens + self.per_square * extent.square
        padding = self.per_padding * extent.padding + self.per_padding_square * extent.padding_square
        return round(whole + padding + self.per_padded_token * extent.padded_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment of a block's backward: what it still keeps, gradients of its parameters, everything else."""

    kept: Size
    gradients: float
    temporaries: Size

    @property
    def total(self) -> Size:
        """Bytes alive at that moment, as a polynomial in tokens."""
        return self.kept.plus(self.temporaries).plus(Size(constant=self.gradients))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPass:
    """FLOPs of products and bytes of other operations in one direction through a block, and their numbers."""

    flops: Size
    bytes: Size
    products: float
    operations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedBlock:
    """One kind of block, trained one way. Of several moments, any may be the worst: it depends on the tokens."""

    kept: Size
    """Held by autograd from forward to backward, its input among it where autograd keeps that."""
    forward: tuple[Size, ...]
    """Beyond its input, when it keeps nothing."""
    building: tuple[Size, ...]
    """In a forward that keeps everything, its input included."""
    backward: tuple[Moment, ...]
    adding: tuple[Moment, ...]
    """Moments of backward where gradients exist already and fresh ones are added to them, or used at once."""
    recomputed: tuple[Moment, ...]
    """Moments of a block that runs again first, beyond its input."""
    recomputed_adding: tuple[Moment, ...]
    there: TracedPass
    back: TracedPass
    heads: int
    head_size: int
    flops_per_pair: float
    """FLOPs of fused attention, forward and backward, for each pair of a query and a key."""
    leaves: Size | None = None
    """Left by a recomputed block beyond an input of one hidden state, until it runs again: more copies of that (AltUp),
    keys and values that later blocks share (Gemma 3n). None where nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """All that is not the same for every model in one step of one way of training."""

    blocks: tuple[TracedBlock, ...]
    """One for each kind of block, in the order of ``ModelSpec.kinds``."""
    first: TracedBlock | None
    """The block at which backward ends, where adapters alone train."""
    around: Size
    """Alive from the first block to backward beside what blocks keep: tables of positions, masks."""
    around_forward: Size
    final_norm_kept: Size
    final_norm_forward: Size
    final_norm_backward: Size
    squares_stream: bool
    """True where squares are of the whole stream: its rows are told apart by a mask."""
    around_recomputed: Size | None = None
    """``around`` where a block recomputes and so keeps what it was called with; None where that is no more."""
    chunk: int = 0
    """Tokens of a chunk, to whole ones of which state-space mixers pad a row; 0 where none does."""

    def extent(self, shape: BatchShape) -> Extent:
        """Tokens, squares and padding that sizes are meant for."""
        square = shape.tokens**2 if self.squares_stream else shape.pairs()
        row = shape.row_tokens  # the only one: such mixers take one row at a time
        padded = -(-row // self.chunk) * self.chunk if self.chunk else row
        return Extent(
            tokens=shape.tokens,
            square=square,
            padding=padded - row,
            padding_square=padded**2 - row**2,
            padded_tokens=shape.tokens if padded > row else 0,
        )
