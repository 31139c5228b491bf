"""A stream of rows must give what each row gives alone in plain transformers."""

import pytest

from fitune.models.attention import use_attention
from fitune.models.language_model import language_model
from fitune.values.plan import ChunkedLoss, PlainLoss
from models.streams import assert_same_step, loss_and_gradients, make_rows, reference, stream_of
from models.tiny_models import FAMILIES, tiny_model

ROWS = make_rows((9, 4, 13))
PREFIX = 3
CHUNKED = ("sdpa", ChunkedLoss(chunk_tokens=5), 2)
EAGER = ("eager", ChunkedLoss(chunk_tokens=7), 3)
CASES = [
    *((family, *CHUNKED) for family in FAMILIES),
    *((family, *EAGER) for family in ("llama", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2")),
    ("llama", "sdpa", PlainLoss(), 0), ("gemma2", "sdpa", PlainLoss(), 0),
]  # fmt: skip
"""Written out, attention differs between families by window, cap, groups and bias."""


@pytest.mark.parametrize(("family", "attention", "loss", "blocks"), CASES)
def test_stream_equals_rows_alone(family, attention, loss, blocks):
    words = {"attention": attention, "loss": loss, "blocks": blocks, "unsupervised_prefix": PREFIX}
    expected = reference(tiny_model(family).train(), ROWS, unsupervised_prefix=PREFIX)
    assert_same_step(loss_and_gradients(tiny_model(family).train(), ROWS, **words), expected)


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
