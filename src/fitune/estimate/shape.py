"""How many tokens a micro-batch holds: the only thing about the data that memory depends on."""

from dataclasses import dataclass

from fitune.spec.plan import Plan


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


def largest_batch(plan: Plan) -> BatchShape:
    """The most the plan allows: every row full, every token but the first of each row predicted.

    A pack may be one row, when attention's rows are longest, or several, when attention keeps a joined copy of
    their outputs: both are counted.
    """
    batch = plan.batch
    tokens = batch.micro_batch_tokens
    return BatchShape(
        tokens=tokens,
        supervised_tokens=tokens - batch.micro_batch_size,
        rows=batch.micro_batch_size * (2 if batch.packing else 1),
        longest_row=batch.seq_len,
    )
