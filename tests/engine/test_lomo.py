"""LOMO is SGD inside backward, bit for bit; AdaLomo is its written-out algorithm; one gradient is alive at a time."""

import math

import pytest
import torch

from fitune.engine.fused_rules import Division, rule_for
from fitune.engine.in_backward import InBackwardEngine
from fitune.engine.plain import PlainEngine
from fitune.errors import TrainingFailed
from fitune.models.language_model import language_model, recompute_blocks
from fitune.values.plan import (
    ChunkedLoss,
    ClipByNorm,
    ClipByValue,
    Lomo,
    PlainLoss,
    Precision,
    Recompute,
    Sgd,
)
from models.streams import forward_backward, make_rows, optimizer_step, stream_of
from models.tiny_models import tiny_model

UNCLIPPED = ClipByValue(value=math.inf)


def small(family="llama", *, recompute=0, chunk=0, dtype=torch.float32, **changes):
    model = tiny_model(family, **changes).to(dtype).train().requires_grad_(True)
    parts = language_model(model, ChunkedLoss(chunk_tokens=chunk) if chunk else PlainLoss())
    recompute_blocks(parts.blocks, Recompute(blocks=recompute), has_dropout=False)
    return parts


def lomo(parts, *, adaptive=False, clip=UNCLIPPED, weight_decay=0.0, precision=Precision.FP32):
    rule = rule_for(
        parts.trained, tuning=Lomo(adaptive=adaptive, clip=clip), optimizer=Sgd(weight_decay=weight_decay),
        precision=precision,
    )  # fmt: skip
    return InBackwardEngine(
        parts, parts.trained, rule=rule, clip=clip, precision=precision, used_twice=used_twice(parts)
    )


def used_twice(parts):
    both = {id(p) for p in parts.head.module.parameters()} & {id(p) for p in parts.body.parameters()}
    return [name for name, p in parts.trained.items() if id(p) in both]


def plain(parts, *, max_grad_norm=0.0, weight_decay=0.0):
    return PlainEngine(
        parts, parts.trained, optimizer=Sgd(weight_decay=weight_decay), precision=Precision.FP32,
        max_grad_norm=max_grad_norm,
    )  # fmt: skip


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


def with_weights(parts, start):
    """``parts``, whose weights are those of ``start`` from now on."""
    with torch.no_grad():
        for name, parameter in parts.trained.items():
            parameter.copy_(start[name])
    return parts


def assert_equal(ours, theirs):
    for name, tensor in weights(theirs).items():
        assert torch.equal(weights(ours)[name], tensor), name


def damaged():
    """A model with a weight that is no number."""
    parts = small()
    with torch.no_grad():
        parts.trained["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    return parts


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize(
    ("recompute", "chunk", "weight_decay"), [(0, 0, 0.0), (3, 5, 0.1)], ids=["plain", "recomputed, chunked, decayed"]
)  # fmt: skip
def test_lomo_is_sgd_bit_for_bit(family, recompute, chunk, weight_decay):
    """Tied weights too: their gradient waits until head and embedding have both added to it."""
    ours, theirs = (small(family, recompute=recompute, chunk=chunk) for _ in range(2))
    found = steps(lomo(ours, weight_decay=weight_decay))
    expected = steps(plain(theirs, weight_decay=weight_decay))
    assert found == expected
    assert found[-1] != found[0]
    assert_equal(ours, theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recompute", [0, 2])
def test_clipping_by_norm_is_plain_clipping(family, recompute):
    """Two passes, each over the whole norm: of the head, the body, and what is both."""
    ours, theirs = (small(family, recompute=recompute) for _ in range(2))
    found = steps(lomo(ours, clip=ClipByNorm(max_norm=0.5)))
    expected = steps(plain(theirs, max_grad_norm=0.5))
    assert found == pytest.approx(expected, rel=1e-6)
    for name, tensor in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_norm_is_reported_by_one_pass_and_by_two():
    stream = stream_of(make_rows((9, 14)))
    norms = []
    for make in (lomo, lambda parts: lomo(parts, clip=ClipByNorm(max_norm=1e-3)), plain):
        engine = make(small())
        forward_backward(engine, stream, 22)
        norms.append(optimizer_step(engine, 0.1).grad_norm)
    assert norms[:2] == pytest.approx([norms[2]] * 2, rel=1e-6)


def test_clipping_by_value_cuts_every_element():
    ours, theirs = small(), small()
    steps(lomo(ours, clip=ClipByValue(value=1e-3)), 1, rate=1.0)
    before = weights(theirs)
    engine = plain(theirs)
    stream = stream_of(make_rows((9, 14), seed=0), unsupervised_prefix=3)
    forward_backward(engine, stream)
    for name, parameter in theirs.trained.items():
        expected = before[name] - parameter.grad.clamp(-1e-3, 1e-3)
        assert torch.equal(weights(ours)[name], expected), name


@pytest.mark.parametrize("clip", [UNCLIPPED, ClipByNorm(max_norm=1.0)], ids=["value", "norm"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["lomo", "adalomo"])
def test_one_gradient_is_alive_at_a_time(adaptive, clip):
    parts = small(recompute=2)
    engine = lomo(parts, adaptive=adaptive, clip=clip)
    alive = []

    def count(_):
        alive.append(sum(p.grad is not None for p in parts.trained.values()))

    for parameter in parts.trained.values():
        parameter.register_post_accumulate_grad_hook(count)
    steps(engine, 1)
    passes = 1 if clip is UNCLIPPED else 2
    assert not any(alive)
    assert len(alive) == passes * (len(parts.trained) - 1)  # the loss leaves the head's, which is used first
    assert all(p.grad is None for p in parts.trained.values())


def written_out_adalomo(theta, g, memory, t, alpha):
    """Algorithm 1 of arXiv 2310.10195 with the whole matrix v, in fp64."""
    theta, g = theta.double(), g.double()
    beta = 1 - t**-0.8
    square = g**2 + 1e-30
    if g.ndim < 2:
        memory["v"] = beta * memory.get("v", 0) + (1 - beta) * square
        v = memory["v"]
    else:
        memory["r"] = beta * memory.get("r", 0) + (1 - beta) * square.mean(dim=-1, keepdim=True)
        memory["c"] = beta * memory.get("c", 0) + (1 - beta) * square.mean(dim=-2, keepdim=True)
        v = memory["r"] * memory["c"] / memory["r"].mean(dim=-2, keepdim=True)
    u = g / v.sqrt()
    u = u / max(1.0, u.square().mean().sqrt().item())
    return theta - alpha * max(1e-3, theta.square().mean().sqrt().item()) * u


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_adalomo_is_its_algorithm(family):
    ours, theirs = small(family), small(family)
    engine, memories = lomo(ours, adaptive=True), {name: {} for name in theirs.trained}
    for t in range(1, 4):
        stream = stream_of(make_rows((9, 14), seed=t))
        for parts in (ours, theirs):
            parts.whole.zero_grad()
        forward_backward(engine, stream, 21)
        optimizer_step(engine, 0.01)
        forward_backward(plain(theirs), stream, 21)
        with torch.no_grad():
            for name, p in theirs.trained.items():
                expected = written_out_adalomo(p, p.grad, memories[name], t, 0.01)
                p.copy_(expected)
                torch.testing.assert_close(ours.trained[name].detach(), p.detach(), rtol=2e-4, atol=2e-5)


def test_an_overflow_in_fp16_changes_nothing_but_the_scale():
    parts = small(dtype=torch.float16)
    engine = lomo(parts, precision=Precision.FP16)
    assert engine.loss_scale is not None
    engine.loss_scale.value = 2.0**40
    before = weights(parts)
    stream = stream_of(make_rows((9, 14)))
    forward_backward(engine, stream, 22)
    update = optimizer_step(engine, 0.1)
    assert update.skipped
    assert engine.loss_scale.value == 2.0**39
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(parts).items())
    engine.loss_scale.value = 2.0**10
    losses = [forward_backward(engine, stream, 22).item()]
    for _ in range(4):
        optimizer_step(engine, 0.05)
        losses.append(forward_backward(engine, stream, 22).item())
    assert losses == sorted(losses, reverse=True)


def test_gradients_that_are_not_finite_stop_the_run():
    for clip, said in (
        (ClipByNorm(max_norm=1.0), "nothing was updated"),
        (UNCLIPPED, "the weights have used them already"),
    ):
        with pytest.raises(TrainingFailed, match=said):
            steps(lomo(damaged(), clip=clip), 1)


def test_a_second_micro_batch_is_refused():
    engine, stream = lomo(small()), stream_of(make_rows((9, 14)))
    forward_backward(engine, stream, 22)
    with pytest.raises(TrainingFailed, match="other micro-batches"):
        forward_backward(engine, stream, 22)


@pytest.mark.parametrize("adaptive", [False, True])
def test_state_continues_where_it_was_taken(adaptive):
    parts = small()
    engine = lomo(parts, adaptive=adaptive)
    steps(engine, 2)
    state = engine.state()
    tensors, start = {k: v.clone() for k, v in state.tensors.items()}, weights(parts)
    expected = steps(engine, 3)
    again = lomo(with_weights(small(), start), adaptive=adaptive)
    again.restore(type(state)(tensors=tensors, facts=state.facts))
    assert steps(again, 3) == expected


@pytest.mark.parametrize("shape", [(513, 4), (1300, 3), (2, 1024, 5)])
def test_column_norms_in_parts_are_those_of_the_whole(shape):
    """Rounded otherwise: within 1e-6. Up to 512 rows they are the same to the bit."""
    share = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = Division(shape=share.shape)
    expected = share.double().square().mean(dim=-2) + 1e-30
    torch.testing.assert_close(whole.mean_square(share, -2).double(), expected, rtol=1e-6, atol=0)
    few = share[..., :512, :]
    plain = torch.linalg.vector_norm(few, dim=-2).square_().div_(512).add_(1e-30)
    assert torch.equal(Division(shape=few.shape).mean_square(few, -2), plain)
