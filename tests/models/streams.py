"""Hand-made micro-batches: rows of given lengths in one flat stream, labels already shifted."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HandStream:
    input_ids_T: Tensor
    labels_T: Tensor
    position_ids_T: Tensor
    sequence_lengths: tuple[int, ...]

    @property
    def supervised_tokens(self):
        return int((self.labels_T >= 0).sum())


def make_rows(lengths, *, vocab_size=97, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator) for n in lengths]


def stream_of(rows, *, unsupervised_prefix=1):
    """The first ``unsupervised_prefix`` tokens of each row are prompt: nobody predicts them."""
    labels = []
    for row in rows:
        shifted = torch.full_like(row, -100)
        shifted[:-1] = row[1:]
        shifted[: max(0, unsupervised_prefix - 1)] = -100
        labels.append(shifted)
    return HandStream(
        input_ids_T=torch.cat(rows),
        labels_T=torch.cat(labels),
        position_ids_T=torch.cat([torch.arange(len(row)) for row in rows]),
        sequence_lengths=tuple(len(row) for row in rows),
    )


def forward_backward(engine, batch, supervised_tokens=None):
    """The loss of a batch, where nobody measures; of its own labels unless their number is given."""
    tokens = batch.supervised_tokens if supervised_tokens is None else supervised_tokens
    return engine.forward_backward(batch, supervised_tokens=tokens, enter_phase=lambda phase: None)


def optimizer_step(engine, rate):
    return engine.update(learning_rate=rate, enter_phase=lambda phase: None)
