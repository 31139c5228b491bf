"""The micro-batch a plan has to be ready for."""

from fitune.estimate.site import masks_window
from fitune.spec.plan import Plan
from fitune.spec.shape import BatchShape
from fitune.spec.traits import has_scores


def largest_batch(plan: Plan) -> BatchShape:
    """The most the plan allows: every row full, every token but the first of each row predicted.

    A pack is counted as two rows, whose attention outputs are joined into one more copy; where scores are written
    out or a window needs a mask, as the one row that takes most.
    """
    batch = plan.batch
    tokens = batch.micro_batch_tokens
    one_row = has_scores(plan) or masks_window(plan)
    return BatchShape(
        tokens=tokens,
        supervised_tokens=tokens - batch.micro_batch_size,
        rows=batch.micro_batch_size * (2 if batch.packing and not one_row else 1),
        longest_row=batch.seq_len,
    )
