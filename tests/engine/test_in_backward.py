"""Optimizers that step in backward equal the same ones that step after it, bit for bit, with one gradient at a time.

LOMO is SGD inside backward. What AdaLomo computes, and how LOMO cuts gradients, is in test_lomo.py.
"""

import math

import pytest
import torch

from fitune.engine.fused_rules import rule_for
from fitune.engine.in_backward import InBackwardEngine
from fitune.engine.plain import PlainEngine
from fitune.errors import TrainingFailed
from fitune.models.language_model import language_model, recompute_blocks
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    ChunkedLoss,
    ClipByNorm,
    ClipByValue,
    Full,
    InBackward,
    Lomo,
    PlainLoss,
    Precision,
    Recompute,
    Sgd,
)
from models.streams import forward_backward, make_rows, optimizer_step, stream_of
from models.tiny_models import tiny_model
from optional_libraries import NEEDS_BITSANDBYTES

NEVER = ClipByNorm(max_norm=0)
UNCLIPPED = ClipByValue(value=math.inf)
ADAMW = AdamW(beta2=0.99, weight_decay=0.1)
METHODS = {
    "AdamW": (ADAMW, None),
    "8-bit AdamW": (AdamW8bit(beta2=0.99, weight_decay=0.1), None),
    "momentum": (Sgd(momentum=0.9, weight_decay=0.1), None),
    "LOMO": (Sgd(weight_decay=0.1), False),
    "AdaLomo": (Sgd(weight_decay=0.1), True),
}
"""Name -> the optimizer, and of LOMO whether it is the adaptive one."""


def methods(*names):
    marks = {"8-bit AdamW": NEEDS_BITSANDBYTES}
    return pytest.mark.parametrize(
        "method", [pytest.param(METHODS[n], id=n, marks=marks.get(n, ())) for n in names]
    )


OPTIMIZERS = methods("AdamW", "8-bit AdamW", "momentum")
WITH_LOMO = methods("AdamW", "8-bit AdamW", "momentum", "LOMO")


def small(family="llama", *, recompute=0, chunk=0, dtype=torch.float32, **changes):
    model = tiny_model(family, **changes).to(dtype).train().requires_grad_(True)
    parts = language_model(model, ChunkedLoss(chunk_tokens=chunk) if chunk else PlainLoss())
    recompute_blocks(parts.blocks, Recompute(blocks=recompute), has_dropout=False)
    return parts


def in_backward(parts, method, *, clip=NEVER, precision=Precision.FP32):
    optimizer, adaptive = method
    tuning = Full(update=InBackward(clip=clip)) if adaptive is None else Lomo(adaptive=adaptive, clip=clip)
    rule = rule_for(parts.trained, tuning=tuning, optimizer=optimizer, precision=precision)
    both = {id(p) for p in parts.head.module.parameters()} & {id(p) for p in parts.body.parameters()}
    return InBackwardEngine(
        parts, parts.trained, rule=rule, clip=clip, precision=precision,
        used_twice=[name for name, p in parts.trained.items() if id(p) in both],
    )  # fmt: skip


def lomo(parts, *, adaptive=False, clip=UNCLIPPED, weight_decay=0.0, precision=Precision.FP32):
    return in_backward(parts, (Sgd(weight_decay=weight_decay), adaptive), clip=clip, precision=precision)


def after_backward(parts, method, *, max_grad_norm=0.0, precision=Precision.FP32):
    return PlainEngine(
        parts, parts.trained, optimizer=method[0], precision=precision, max_grad_norm=max_grad_norm
    )


def steps(engine, count=3, *, rate=0.05):
    losses = []
    for step in range(count):
        stream = stream_of(make_rows((9, 14), seed=step), unsupervised_prefix=3)
        loss = forward_backward(engine, stream)
        losses.append(loss.item() / stream.supervised_tokens)
        optimizer_step(engine, rate)
    return losses


def weights(parts):
    return {name: p.detach().clone() for name, p in parts.trained.items()}


def assert_equal(ours, theirs):
    for name, tensor in weights(theirs).items():
        assert torch.equal(weights(ours)[name], tensor), name


@pytest.mark.thinned(3)  # of four methods: a divisor of four would leave one out
@WITH_LOMO
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(("recompute", "chunk"), [(2, 5), (0, 0)], ids=["recomputed, chunked", "plain"])
def test_it_is_the_plain_engine_bit_for_bit(family, method, recompute, chunk):
    """Qwen3's head is its embedding, too: its gradient waits until both have added to it."""
    sizes = {} if family == "gpt2" else {"hidden_size": 64}
    ours, theirs = (small(family, recompute=recompute, chunk=chunk, **sizes) for _ in range(2))
    found = steps(in_backward(ours, method), 4, rate=0.01)
    assert found == steps(after_backward(theirs, method), 4, rate=0.01)
    assert found[-1] != found[0]
    assert_equal(ours, theirs)


@OPTIMIZERS
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_MASTER], ids=str)
def test_it_is_the_plain_engine_in_16_bit_too(method, precision):
    ours, theirs = (small(dtype=torch.bfloat16, recompute=2, hidden_size=64) for _ in range(2))
    assert any(p.numel() >= 4096 for p in ours.trained.values())  # smaller ones have no 8-bit states
    found = steps(in_backward(ours, method, precision=precision), 4, rate=0.01)
    assert found == steps(after_backward(theirs, method, precision=precision), 4, rate=0.01)
    assert_equal(ours, theirs)


@WITH_LOMO
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_clipping_by_norm_is_plain_clipping(family, method):
    """Two passes, each over the whole norm: of the head, the body, and what is both. It is summed up in another order:
    that is all that differs."""
    ours, theirs = (small(family, recompute=2) for _ in range(2))
    found = steps(in_backward(ours, method, clip=ClipByNorm(max_norm=0.5)), rate=0.01)
    expected = steps(after_backward(theirs, method, max_grad_norm=0.5), rate=0.01)
    assert found == pytest.approx(expected, rel=1e-5)
    if method == METHODS["LOMO"]:
        for name, tensor in weights(theirs).items():
            torch.testing.assert_close(weights(ours)[name], tensor, rtol=1e-5, atol=1e-6)


@methods("AdamW", "LOMO", "AdaLomo")
@pytest.mark.parametrize("clip", [UNCLIPPED, ClipByNorm(max_norm=1.0)], ids=["by value", "by norm"])
def test_one_gradient_is_alive_at_a_time(method, clip):
    parts = small(recompute=2)
    engine = in_backward(parts, method, clip=clip)
    bytes_alive = []

    def count(_):
        bytes_alive.append(sum(p.grad.nbytes for p in parts.trained.values() if p.grad is not None))

    for parameter in parts.trained.values():
        parameter.register_post_accumulate_grad_hook(count)
    steps(engine, 2)
    assert not any(bytes_alive)
    passes = 1 if clip is UNCLIPPED else 2
    # the loss leaves the head's, which is used before the body goes back
    assert len(bytes_alive) == 2 * passes * (len(parts.trained) - 1)
    assert all(p.grad is None for p in parts.trained.values())


@methods("AdamW", "8-bit AdamW", "momentum", "LOMO", "AdaLomo")
def test_its_state_goes_on_here_and_in_the_plain_engine(method):
    """Kept under the same names: a run may change its mind, but for LOMO, which has no masters either."""
    is_lomo = method[1] is not None
    precision = Precision.FP32 if is_lomo else Precision.BF16_MASTER
    dtype = torch.float32 if is_lomo else torch.bfloat16
    parts = small(dtype=dtype, hidden_size=64)
    engine = in_backward(parts, method, precision=precision)
    steps(engine, 2, rate=0.01)
    state, start = engine.state(), weights(parts)
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    expected = steps(engine, 3, rate=0.01)
    for make in (in_backward,) if is_lomo else (in_backward, after_backward):
        other = small(dtype=dtype, hidden_size=64)
        other.whole.load_state_dict(start, strict=False)
        again = make(other, method, precision=precision)
        again.restore(type(state)(tensors=tensors, facts=state.facts))
        assert steps(again, 3, rate=0.01) == expected


@methods("AdamW", "LOMO")
def test_an_overflow_in_fp16_changes_nothing_but_the_scale(method):
    parts = small(dtype=torch.float16)
    engine = in_backward(parts, method, precision=Precision.FP16)
    stream = stream_of(make_rows((9, 14)))
    assert engine.loss_scale is not None
    engine.loss_scale.value = 2.0**40
    before, states = weights(parts), {k: v.clone() for k, v in engine.state().tensors.items()}
    forward_backward(engine, stream, 22)
    assert optimizer_step(engine, 0.1).skipped
    assert engine.loss_scale.value == 2.0**39
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(parts).items())
    assert all(torch.equal(tensor, states[name]) for name, tensor in engine.state().tensors.items())
    engine.loss_scale.value = 2.0**10
    losses = []
    for _ in range(5):
        losses.append(forward_backward(engine, stream, 22).item())
        optimizer_step(engine, 0.01)
    assert losses == sorted(losses, reverse=True)


def test_gradients_that_are_not_finite_stop_the_run():
    for clip, said in (
        (ClipByNorm(max_norm=1.0), "nothing was updated"),
        (UNCLIPPED, "the weights have used them already"),
    ):
        parts = small()
        with torch.no_grad():
            parts.trained["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
        with pytest.raises(TrainingFailed, match=said):
            steps(lomo(parts, clip=clip), 1)


def test_a_second_micro_batch_is_refused():
    engine, stream = lomo(small()), stream_of(make_rows((9, 14)))
    forward_backward(engine, stream, 22)
    with pytest.raises(TrainingFailed, match="other micro-batches"):
        forward_backward(engine, stream, 22)
