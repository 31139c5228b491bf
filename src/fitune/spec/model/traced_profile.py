"""Findings of tracing about a model's blocks, as numbers that any plan can be estimated from without torch.

Every size is a polynomial in the tokens of a micro-batch, so one trace stands for all lengths of rows.
"""

from dataclasses import dataclass

from fitune.spec.model.block_profile import BatchShape


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
