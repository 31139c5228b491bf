"""Optimizers that step in backward equal the same ones that step after it, bit for bit, with one gradient at a time."""

import pytest
import torch

from engine.test_lomo import (
    UNCLIPPED,
    assert_equal,
    plain,
    small,
    steps,
    used_twice,
    weights,
    with_weights,
)
from fitune.engine.fused_rules import rule_for
from fitune.engine.in_backward import InBackwardEngine
from fitune.engine.plain import PlainEngine
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    ClipByNorm,
    Full,
    InBackward,
    Precision,
    Sgd,
)
from models.streams import forward_backward, make_rows, optimizer_step, stream_of
from optional_libraries import NEEDS_BITSANDBYTES

NEVER = ClipByNorm(max_norm=0)
ADAMW = AdamW(beta2=0.99, weight_decay=0.1)
EIGHT_BIT = AdamW8bit(beta2=0.99, weight_decay=0.1)
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(ADAMW, id="AdamW"),
        pytest.param(EIGHT_BIT, id="8-bit AdamW", marks=NEEDS_BITSANDBYTES),
        pytest.param(Sgd(momentum=0.9, weight_decay=0.1), id="momentum"),
    ],
)


def in_backward(
    parts, optimizer, *, clip = NEVER, precision=Precision.FP32
) :  # fmt: skip
    rule = rule_for(
        parts.trained, tuning=Full(update=InBackward(clip=clip)), optimizer=optimizer, precision=precision
    )
    return InBackwardEngine(
        parts, parts.trained, rule=rule, clip=clip, precision=precision, used_twice=used_twice(parts)
    )


def after_backward(parts, optimizer, *, max_grad_norm=0.0, precision=Precision.FP32):
    return PlainEngine(
        parts, parts.trained, optimizer=optimizer, precision=precision, max_grad_norm=max_grad_norm
    )


@pytest.mark.thinned(2)
@OPTIMIZERS
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("recompute", "chunk"), [(0, 0), (2, 5)], ids=["plain", "recomputed, chunked"])
def test_it_is_the_plain_engine_bit_for_bit(family, optimizer, recompute, chunk):
    """Qwen3's head is its embedding, too: its gradient waits until both have added to it."""
    ours, theirs = (small(family, recompute=recompute, chunk=chunk, hidden_size=64) for _ in range(2))
    assert any(p.numel() >= 4096 for p in ours.trained.values())  # smaller ones have no 8-bit states
    found = steps(in_backward(ours, optimizer), 4, rate=0.01)
    expected = steps(after_backward(theirs, optimizer), 4, rate=0.01)
    assert found == expected
    assert found[-1] != found[0]
    assert_equal(ours, theirs)


@OPTIMIZERS
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_MASTER], ids=str)
def test_it_is_the_plain_engine_in_16_bit_too(optimizer, precision):
    ours, theirs = (small(dtype=torch.bfloat16, recompute=2, hidden_size=64) for _ in range(2))
    found = steps(in_backward(ours, optimizer, precision=precision), 4, rate=0.01)
    assert found == steps(after_backward(theirs, optimizer, precision=precision), 4, rate=0.01)
    assert_equal(ours, theirs)


@OPTIMIZERS
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_clipping_by_norm_is_plain_clipping(family, optimizer):
    """The norm is summed up in another order: that is all that differs."""
    ours, theirs = (small(family, recompute=2) for _ in range(2))
    found = steps(in_backward(ours, optimizer, clip=ClipByNorm(max_norm=0.5)), rate=0.01)
    expected = steps(after_backward(theirs, optimizer, max_grad_norm=0.5), rate=0.01)
    assert found == pytest.approx(expected, rel=1e-5)


@OPTIMIZERS
@pytest.mark.parametrize("clip", [NEVER, ClipByNorm(max_norm=1.0)], ids=["never", "by norm"])
def test_one_gradient_is_alive_at_a_time(optimizer, clip):
    parts = small(recompute=2)
    engine = in_backward(parts, optimizer, clip=clip)
    bytes_alive = []

    def count(_):
        bytes_alive.append(sum(p.grad.nbytes for p in parts.trained.values() if p.grad is not None))

    for parameter in parts.trained.values():
        parameter.register_post_accumulate_grad_hook(count)
    steps(engine, 2)
    assert not any(bytes_alive)
    passes = 2 if clip.max_norm else 1
    # the loss leaves the head's, which is used before the body goes back
    assert len(bytes_alive) == 2 * passes * (len(parts.trained) - 1)
    assert all(p.grad is None for p in parts.trained.values())


@OPTIMIZERS
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MASTER], ids=str)
def test_its_state_goes_on_here_and_in_the_plain_engine(optimizer, precision):
    """Kept under the same names: a run may change its mind."""
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    parts = small(dtype=dtype, hidden_size=64)
    engine = in_backward(parts, optimizer, precision=precision)
    steps(engine, 2, rate=0.01)
    state, start = engine.state(), weights(parts)
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    expected = steps(engine, 3, rate=0.01)
    for make in (in_backward, after_backward):
        other = with_weights(small(dtype=dtype, hidden_size=64), start)
        again = make(other, optimizer, precision=precision)
        again.restore(type(state)(tensors=tensors, facts=state.facts))
        assert steps(again, 3, rate=0.01) == expected


def test_an_overflow_in_fp16_changes_nothing_but_the_scale():
    parts = small(dtype=torch.float16)
    engine = in_backward(parts, ADAMW, precision=Precision.FP16)
    assert engine.loss_scale is not None
    engine.loss_scale.value = 2.0**40
    before, masters = weights(parts), {k: v.clone() for k, v in engine.state().tensors.items()}
    steps(engine, 1)
    assert engine.loss_scale.value == 2.0**39
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(parts).items())
    assert all(torch.equal(tensor, masters[name]) for name, tensor in engine.state().tensors.items())
    engine.loss_scale.value = 2.0**10
    losses = [steps_on_one_batch(engine, rate=0.01) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_sgd_in_backward_is_lomo():
    ours, theirs = small(), small()
    assert steps(in_backward(ours, Sgd(), clip=UNCLIPPED)) == steps(plain(theirs))
    assert_equal(ours, theirs)


def steps_on_one_batch(engine, *, rate):
    stream = stream_of(make_rows((9, 14)))
    loss = forward_backward(engine, stream, 22)
    optimizer_step(engine, rate)
    return loss.item()
