"""Rotary positions that depend on a length: no row changes the loss of another."""

import pytest
import torch

from fitune.models.attention import turn_by_rows, turns_by_length, use_attention
from fitune.models.language_model import language_model
from fitune.values.plan import PlainLoss
from models.streams import make_rows, stream_of
from models.tiny_models import tiny_model

BOUNDARY = 12
ROWS = make_rows((9, 30, 4, 13, 12))
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BOUNDARY,
    "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 4.0, 9.0, 30.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
CASES = {
    "phi3-longrope": (
        "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": BOUNDARY}
    ),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}),
    "qwen3-dynamic": ("qwen3", {"rope_parameters": DYNAMIC, "max_position_embeddings": BOUNDARY}),
    "falcon-dynamic": ("falcon", {"rope_parameters": DYNAMIC, "max_position_embeddings": BOUNDARY}),
    "gemma3-of-its-layers": (
        "gemma3_text",
        {"rope_parameters": {
            "full_attention": LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
}  # fmt: skip


def rows_alone(family, changes):
    """Summed loss and gradients by transformers' own forward, each row by a model that saw no other before."""
    total, gradients = 0.0, {}
    for row in ROWS:
        model = tiny_model(family, **changes).train()
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
        loss.backward()
        total += loss.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return total, gradients


def ours(family, changes):
    model = tiny_model(family, **changes)
    use_attention(model, "sdpa")
    turn_by_rows(model)
    return language_model(model, PlainLoss())


def test_a_config_says_whether_rows_of_other_lengths_are_turned_otherwise():
    for family, changes in CASES.values():
        assert turns_by_length(tiny_model(family, **changes).config)
    assert not turns_by_length(tiny_model("llama").config)


@pytest.mark.parametrize("case", CASES)
def test_a_row_beside_longer_ones_has_the_loss_it_has_alone(case):
    family, changes = CASES[case]
    expected, gradients = rows_alone(family, changes)
    parts, stream = ours(family, changes), stream_of(ROWS)
    parts.whole.train()
    hidden = parts.hidden_states(stream)
    found, gradient = parts.loss_and_gradient(hidden.detach(), stream, scale=1.0)
    hidden.backward(gradient)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert parts.loss(stream).item() == pytest.approx(expected, rel=1e-6)
    for name, parameter in parts.trained.items():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_rows_seen_before_change_nothing(case):
    """transformers keeps the largest length that it saw: the model must not remember one."""
    family, changes = CASES[case]
    parts = ours(family, changes)
    short, mixed = stream_of(ROWS[:1]), stream_of(ROWS)
    fresh = parts.loss(short).item()
    parts.loss(mixed)
    assert parts.loss(short).item() == fresh


def test_the_rows_of_these_tests_do_feel_the_length():
    """Without turning by rows the loss is another: the tests above can fail."""
    for family, changes in CASES.values():
        model = tiny_model(family, **changes)
        use_attention(model, "sdpa")
        plain = language_model(model, PlainLoss()).loss(stream_of(ROWS)).item()
        assert abs(plain / ours(family, changes).loss(stream_of(ROWS)).item() - 1) > 1e-4
