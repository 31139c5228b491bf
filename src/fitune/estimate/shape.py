"""The micro-batch a plan has to be ready for."""

from fitune.spec.plan import Plan
from fitune.spec.shape import BatchShape


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
