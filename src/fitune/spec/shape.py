"""How many tokens a micro-batch holds: the only thing about the data that memory depends on."""

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

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.longest_row or -(-self.tokens // self.rows)
