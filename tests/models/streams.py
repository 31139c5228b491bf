"""Hand-made micro-batches: rows of given lengths in one flat stream, labels already shifted."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fitune.models.attention import use_attention
from fitune.models.language_model import language_model, recompute_blocks
from fitune.values.plan import PlainLoss, Recompute


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


def loss_and_gradients(model, rows, *, attention="sdpa", loss=None, blocks=0, unsupervised_prefix=1):
    """As an engine takes them, from all rows in one stream."""
    use_attention(model, attention)
    parts = language_model(model, loss or PlainLoss())
    recompute_blocks(parts.blocks, Recompute(blocks=blocks), has_dropout=False)
    stream = stream_of(rows, unsupervised_prefix=unsupervised_prefix)
    hidden = parts.hidden_states(stream)
    total, gradient = parts.loss_and_gradient(hidden.detach(), stream, scale=1 / stream.supervised_tokens)
    hidden.backward(gradient)
    return total.item() / stream.supervised_tokens, gradients_of(model)


def reference(model, rows, *, unsupervised_prefix=1):
    """Loss and gradients by transformers' own forward, one row at a time, labels masked by hand."""
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, unsupervised_prefix - 1 : -1].float()
        targets = row[unsupervised_prefix:]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        count += len(targets)
    (total / count).backward()
    return total.item() / count, gradients_of(model)


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(found, expected):
    """Loss and gradient of every weight, to fp32's rounding."""
    assert found[0] == pytest.approx(expected[0], abs=2e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def forward_backward(engine, batch, supervised_tokens=None):
    """The loss of a batch, where nobody measures; of its own labels unless their number is given."""
    tokens = batch.supervised_tokens if supervised_tokens is None else supervised_tokens
    return engine.forward_backward(batch, divisor=tokens, enter_phase=lambda phase: None)


def optimizer_step(engine, rate):
    return engine.update(learning_rate=rate, enter_phase=lambda phase: None)
