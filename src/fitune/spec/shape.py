"""Tokens and rows of a micro-batch: the only thing about the data that memory depends on."""

from collections.abc import Sequence
from dataclasses import dataclass

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

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.longest_row or -(-self.tokens // self.rows)

    def pairs(self, *, in_rows_over: int = 0) -> int:
        """Σ n² over the rows of n tokens; of those alone that are longer than ``in_rows_over``."""
        if self.row_lengths:
            return sum(n * n for n in self.row_lengths if n > in_rows_over)
        return self.tokens * self.row_tokens if self.row_tokens > in_rows_over else 0

    def tokens_in_rows_over(self, length: int) -> int:
        """Tokens of the rows that are longer than ``length``."""
        if self.row_lengths:
            return sum(n for n in self.row_lengths if n > length)
        return self.tokens if self.row_tokens > length else 0
