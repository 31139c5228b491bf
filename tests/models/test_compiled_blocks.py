"""Compiled blocks say what uncompiled ones say, with recompute and adapters, and one compilation serves all streams."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fitune.models.adapters import add_adapters
from fitune.models.attention import use_attention
from fitune.models.language_model import blocks_of, compile_blocks, language_model, recompute_blocks
from fitune.models.low_bit.packing import quantise_blocks
from fitune.values.plan import Dense, Hqq, Lora, Nf4, PlainLoss, Recompute
from models.streams import make_rows, stream_of
from models.tiny_models import tiny_model

STREAMS = ((9, 4, 13), (5, 7), (11,), (3, 4, 5, 6), (20,))
TARGETS = ("q_proj", "v_proj", "down_proj")


def losses_and_gradients(
    family,
    *,
    backend=None,
    base=None,
    after_each=lambda: None,
):
    """Of five streams of different lengths; the first of two blocks is recomputed. ``base`` None: all is trained."""
    torch._dynamo.reset()
    model = tiny_model(family, num_hidden_layers=2).train()
    use_attention(model, "sdpa")
    whole = model
    if base is not None:
        quantise_blocks(blocks_of(model), base)
        lora = Lora(rank=4, alpha=8, dropout=0.0, targets=TARGETS, base=base)
        whole = add_adapters(model, lora, dtype=torch.float32, seed=0)
    parts = language_model(whole, PlainLoss())
    if backend is not None:
        compile_blocks(parts.blocks, backend=backend)
    recompute_blocks(parts.blocks, Recompute(blocks=1), has_dropout=False)
    losses = []
    for seed, lengths in enumerate(STREAMS):
        stream = stream_of(make_rows(lengths, seed=seed))
        hidden_TD = parts.hidden_states(stream)
        total, gradient_TD = parts.loss_and_gradient(
            hidden_TD.detach(), stream, scale=1 / stream.supervised_tokens
        )
        hidden_TD.backward(gradient_TD)
        losses.append(total.item() / stream.supervised_tokens)
        parts.loss(stream)  # evaluation between two steps compiles nothing
        after_each()
    return losses, {n: p.grad for n, p in parts.trained.items() if p.grad is not None}


def assert_same(found, expected, *, tolerance=1e-6):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=10 * tolerance * scale)


def test_the_same_losses_and_gradients_and_nothing_compiled_for_later_streams():
    """The second stream is the first that says what changes from one to the next."""
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    found = losses_and_gradients(
        "llama", backend=counter, after_each=lambda: counts.append(counter.frame_count)
    )
    assert_same(found, losses_and_gradients("llama"))
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * (len(STREAMS) - 1)


@pytest.mark.parametrize(
    ("family", "base"),
    [
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("gemma2", "mixtral")),
        *(pytest.param(name, None, marks=pytest.mark.weekly) for name in ("qwen3", "gpt2")),
        *(pytest.param("llama", base, marks=pytest.mark.slow) for base in (Dense(), Nf4(), Hqq(bits=4))),
    ],
    ids=str,
)
def test_other_families_and_adapters_on_every_base(family, base):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("hqq.core.quantize")
    expected = losses_and_gradients(family, base=base)
    assert_same(losses_and_gradients(family, base=base, backend="aot_eager"), expected)


@pytest.mark.slow
def test_inductors_own_kernels():
    """It fuses and so rounds otherwise; it needs a C++ compiler on a CPU."""
    assert_same(
        losses_and_gradients("llama", backend="inductor"), losses_and_gradients("llama"), tolerance=1e-5
    )
