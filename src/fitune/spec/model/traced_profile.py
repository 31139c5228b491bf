"""Findings of tracing about a model's blocks, as numbers that any plan can be estimated from without torch.

Every size is a polynomial in the tokens of a micro-batch, so one trace stands for all lengths of rows.
"""

from dataclasses import dataclass

from fitune.spec.model.block_profile import BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Bytes (or FLOPs, where a field says so): constant + per_token · t + per_square · Σ n².

    ``TracedStep.squares_stream`` says whether n are the rows' lengths or the stream's.
    """

    constant: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def plus(self, other: "Size", times: float = 1.0) -> "Size":
        """This one and ``times`` the other."""
        return Size(
            constant=self.constant + times * other.constant,
            per_token=self.per_token + times * other.per_token,
            per_square=self.per_square + times * other.per_square,
        )

    def exceeds(self, other: "Size") -> bool:
        """True if it is at least the other for every micro-batch."""
        return (
            self.constant >= other.constant
            and self.per_token >= other.per_token
            and self.per_square >= other.per_square
        )

    def at(self, tokens: int, square: int) -> int:
        """The value for so many tokens and such a sum of squares."""
        return round(self.constant + self.per_token * tokens + self.per_square * square)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One moment of a block's backward: what it still keeps, gradients of its parameters, everything else."""

    kept: Size
    gradients: float
    temporaries: Size

    @property
    def total(self) -> Size:
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
    """The same where gradients exist already and fresh ones are added to them, or used at once."""
    recomputed: tuple[Moment, ...]
    """Of a block that runs again first, beyond its input."""
    recomputed_adding: tuple[Moment, ...]
    there: TracedPass
    back: TracedPass
    heads: int
    head_size: int
    flops_per_pair: float
    """Of fused attention, forward and backward, for each pair of a query and a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """All that is not the same for every model in one step of one way of training."""

    blocks: tuple[TracedBlock, ...]
    """One for each kind of block, in the order of ``ModelSpec.kinds``."""
    first: TracedBlock | None
    """The first block where no gradient goes further back than to it."""
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

    def square(self, shape: BatchShape) -> int:
        """Σ n² that sizes are meant for."""
        return shape.tokens**2 if self.squares_stream else shape.pairs()
