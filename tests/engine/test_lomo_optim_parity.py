"""LOMO against its authors' package, lomo-optim 0.1.1, whose Lomo also runs on a CPU."""

import pytest

from engine.test_in_backward import UNCLIPPED, lomo, small, steps, weights
from fitune.values.plan import ClipByNorm, ClipByValue
from models.streams import make_rows, stream_of

lomo_optim = pytest.importorskip(
    "lomo_optim", reason="pip install lomo-optim: the authors' LOMO is not there"
)

STEPS, RATE = 4, 0.05


def steps_of_theirs(parts, **settings):
    """Their hooks update while the same loss goes back; it is handed on as a product that has its gradient."""
    theirs = lomo_optim.Lomo(parts.whole, **settings)
    for step in range(STEPS):
        stream = stream_of(make_rows((9, 14), seed=step), unsupervised_prefix=3)

        def loss(stream=stream):
            hidden_TD = parts.hidden_states(stream)
            _, gradient_TD = parts.loss_and_gradient(
                hidden_TD.detach(), stream, scale=1 / stream.supervised_tokens
            )
            return (hidden_TD * gradient_TD).sum()

        if settings.get("clip_grad_norm"):
            theirs.grad_norm(loss())
        theirs.fused_backward(loss(), RATE)


def largest_difference(family, ours, theirs):
    """Of any weight, in units of the longest way that one of them has gone."""
    start, one, other = (small(family) for _ in range(3))
    if "weight_decay" in theirs:  # they decay vectors, too
        for parts in (start, one, other):
            for vector in (p for p in parts.whole.parameters() if p.ndim < 2):
                vector.requires_grad_(False)
    steps(lomo(one, **ours), STEPS, rate=RATE)
    steps_of_theirs(other, **theirs)
    before, found, expected = (weights(parts) for parts in (start, one, other))
    way = max((expected[name] - before[name]).abs().max().item() for name in before)
    assert way > 1e-3
    return max((found[name] - expected[name]).abs().max().item() for name in before) / way


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"clip": UNCLIPPED}, {}), ({"clip": ClipByValue(value=1e-2)}, {"clip_grad_value": 1e-2})],
    ids=["unclipped", "by value"],
)
def test_lomo_is_its_authors_bit_for_bit(ours, theirs):
    assert largest_difference("llama", ours, theirs) == 0


@pytest.mark.parametrize(
    ("family", "ours", "theirs"),
    [
        ("llama", {"clip": ClipByNorm(max_norm=0.5)}, {"clip_grad_norm": 0.5}),
        ("llama", {"clip": UNCLIPPED, "weight_decay": 0.1}, {"weight_decay": 0.1}),
        ("qwen3", {"clip": UNCLIPPED}, {}),
    ],
    ids=["by norm", "weight decay", "tied"],
)
def test_lomo_agrees_with_its_authors(family, ours, theirs):
    """They add 1e-6 to the norm, decay before the step, and step a tied weight twice."""
    assert largest_difference(family, ours, theirs) < 1e-4
