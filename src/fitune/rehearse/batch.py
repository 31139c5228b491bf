"""The micro-batch that takes the most memory the plan allows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fitune.spec.plan import Batch, Plan
from fitune.spec.traits import has_scores


@dataclass(frozen=True, slots=True)
class FullStream:
    """A flat stream of T tokens, every row full. Which tokens they are does not matter."""

    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.input_ids_T, self.labels_T, self.position_ids_T


def full_stream(lengths: tuple[int, ...]) -> FullStream:
    """Rows of these lengths; inside a fake mode they hold nothing."""
    tokens = sum(lengths)
    ids_T, labels_T, positions_T = (torch.empty(tokens, dtype=torch.int64) for _ in range(3))
    return FullStream(ids_T, labels_T, positions_T, lengths)


def heaviest_rows(plan: Plan) -> tuple[int, ...]:
    """Lengths of the rows: full ones, and a pack as two rows, whose attention outputs are joined into a copy.

    Where scores are written out, or a window needs a mask, one row as long as the pack takes more.
    """
    batch, window = plan.batch, plan.model.sliding_window
    long_rows_cost = has_scores(plan) or 0 < window < batch.seq_len
    if not batch.packing or long_rows_cost or batch.seq_len < 2:
        return (batch.seq_len,) * batch.micro_batch_size
    half = batch.seq_len // 2
    return (batch.seq_len - half, half) * batch.micro_batch_size


def most_labels(batch: Batch) -> int:
    """Every token of a row but its first is predicted."""
    return batch.micro_batch_tokens - batch.micro_batch_size
