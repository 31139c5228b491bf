"""A stream of rows must give what each row gives alone in plain transformers."""

import pytest
import torch

from fitune.models.attention import use_attention
from fitune.models.language_model import language_model, recompute_blocks
from fitune.spec.plan import ChunkedLoss, PlainLoss, Recompute
from models.streams import make_rows, stream_of
from models.tiny_models import FAMILIES, tiny_model

ROWS = make_rows((9, 4, 13))
PREFIX = 3


def reference(family):
    """Loss and gradients by transformers' own forward, one row at a time, labels masked by hand."""
    model = tiny_model(family).train()
    total, count = torch.zeros(()), 0
    for row in ROWS:
        logits = model(input_ids=row[None]).logits[0, PREFIX - 1 : -1].float()
        targets = row[PREFIX:]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        count += len(targets)
    (total / count).backward()
    return total.item() / count, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(family, *, attention, loss, blocks):
    model = tiny_model(family).train()
    use_attention(model, attention)
    parts = language_model(model, loss)
    recompute_blocks(parts.blocks, Recompute(blocks=blocks), has_dropout=False)
    stream = stream_of(ROWS, unsupervised_prefix=PREFIX)
    hidden = parts.hidden_states(stream)
    total, gradient = parts.loss_and_gradient(hidden.detach(), stream, scale=1 / stream.supervised_tokens)
    hidden.backward(gradient)
    return total.item() / stream.supervised_tokens, {
        n: p.grad for n, p in parts.trained.items() if p.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("attention", "loss", "blocks"),
    [
        ("sdpa", PlainLoss(), 0),
        ("sdpa", ChunkedLoss(chunk_tokens=5), 2),
        ("eager", ChunkedLoss(chunk_tokens=7), 3),
    ],
)
def test_stream_equals_rows_alone(family, attention, loss, blocks):
    expected_loss, expected = reference(family)
    found_loss, found = ours(family, attention=attention, loss=loss, blocks=blocks)
    assert found_loss == pytest.approx(expected_loss, abs=2e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_evaluation_loss_is_the_training_loss():
    parts = language_model(tiny_model(), ChunkedLoss(chunk_tokens=4))
    use_attention(parts.whole, "sdpa")
    stream = stream_of(ROWS)
    trained, _ = parts.loss_and_gradient(parts.hidden_states(stream).detach(), stream, scale=1.0)
    assert parts.loss(stream).item() == pytest.approx(trained.item(), rel=1e-6)


def test_a_config_that_asks_for_tuples_changes_nothing():
    losses = []
    for changes in ({}, {"return_dict": False}):
        parts = language_model(tiny_model("llama", **changes), PlainLoss())
        use_attention(parts.whole, "sdpa")
        losses.append(parts.loss(stream_of(ROWS)).item())
    assert losses[0] == losses[1]


def test_a_stream_without_labels_has_no_loss_and_no_gradient():
    parts = language_model(tiny_model(), PlainLoss())
    use_attention(parts.whole, "sdpa")
    stream = stream_of(ROWS, unsupervised_prefix=100)
    loss, gradient = parts.loss_and_gradient(parts.hidden_states(stream).detach(), stream, scale=1.0)
    assert loss.item() == 0.0
    assert not gradient.any()
    assert parts.loss(stream).item() == 0.0
