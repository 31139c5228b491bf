"""AdaLomo is its written-out algorithm; LOMO cuts every element and says the norm (it is SGD: test_in_backward.py)."""

import pytest
import torch

from engine.test_in_backward import after_backward, lomo, small, steps, weights
from fitune.engine.fused_rules import Division
from fitune.values.plan import ClipByNorm, ClipByValue, Sgd
from models.streams import forward_backward, make_rows, optimizer_step, stream_of


def plain_sgd(parts):
    return after_backward(parts, (Sgd(), None))


def test_the_norm_is_reported_by_one_pass_and_by_two():
    stream = stream_of(make_rows((9, 14)))
    norms = []
    for make in (lomo, lambda parts: lomo(parts, clip=ClipByNorm(max_norm=1e-3)), plain_sgd):
        engine = make(small())
        forward_backward(engine, stream, 22)
        norms.append(optimizer_step(engine, 0.1).grad_norm)
    assert norms[:2] == pytest.approx([norms[2]] * 2, rel=1e-6)


def test_clipping_by_value_cuts_every_element():
    ours, theirs = small(), small()
    steps(lomo(ours, clip=ClipByValue(value=1e-3)), 1, rate=1.0)
    before = weights(theirs)
    engine = plain_sgd(theirs)
    stream = stream_of(make_rows((9, 14), seed=0), unsupervised_prefix=3)
    forward_backward(engine, stream)
    for name, parameter in theirs.trained.items():
        expected = before[name] - parameter.grad.clamp(-1e-3, 1e-3)
        assert torch.equal(weights(ours)[name], expected), name


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
        forward_backward(plain_sgd(theirs), stream, 21)
        with torch.no_grad():
            for name, p in theirs.trained.items():
                expected = written_out_adalomo(p, p.grad, memories[name], t, 0.01)
                p.copy_(expected)
                torch.testing.assert_close(ours.trained[name].detach(), p.detach(), rtol=2e-4, atol=2e-5)


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
