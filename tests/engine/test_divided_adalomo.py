"""AdaLomo on shares: ranks that exchange sums step as one process does, however a weight is divided."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.fused_rules import AdaLomoRule, Division

RANKS, STEPS, RATE = 3, 3, 0.05
SHAPES = [
    pytest.param((6, 5), 0, id="rows"),
    pytest.param((7, 5), 0, id="rows of unequal number"),
    pytest.param((1, 5), 0, id="fewer rows than ranks"),
    pytest.param((2, 6), 1, id="columns"),
    pytest.param((4, 3, 5), 0, id="experts"),
    pytest.param((2, 3, 5), 1, id="rows of each expert"),
    pytest.param((7,), 0, id="a vector"),
]


@dataclass
class Exchange:
    """Sums over threads that stand for ranks: all bring their part, then all take the sum."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS))

    def summed(self, part):
        self.parts[threading.get_ident()] = part.clone()
        self.barrier.wait(timeout=120)
        total = torch.stack(list(self.parts.values())).sum(dim=0)
        self.barrier.wait(timeout=120)
        self.parts.clear()
        self.barrier.wait(timeout=120)
        return part.copy_(total)


@dataclass(frozen=True, kw_only=True)
class ByThreads(Division):
    """A division whose sums are over threads."""

    exchange: Exchange

    def summed(self, part):
        return self.exchange.summed(part)


def shares(whole, dim):
    """As FSDP2 divides: the last ranks have less, or nothing."""
    parts = [part.clone() for part in whole.chunk(RANKS, dim=dim)]
    return parts + [whole.narrow(dim, 0, 0).clone()] * (RANKS - len(parts))


def stepped(weight, gradients, divisions):
    rule = AdaLomoRule({"w": Parameter(weight)}, weight_decay=0.1, divisions=divisions)
    for gradient in gradients:
        rule.begin()
        rule.use("w", gradient.clone(), learning_rate=RATE, factor=0.5)
    return rule


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_ranks_with_shares_step_as_one_with_all(shape, dim):
    torch.manual_seed(0)
    weight, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(STEPS)]
    alone = stepped(weight.clone(), gradients, {})
    division = ByThreads(shape=torch.Size(shape), dim=dim, exchange=Exchange())
    found = {}

    def one_rank(rank):
        own = [shares(gradient, dim)[rank] for gradient in gradients]
        found[rank] = stepped(shares(weight, dim)[rank], own, {"w": division})

    ranks = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(RANKS)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(timeout=240)
    assert sorted(found) == list(range(RANKS))
    together = torch.cat([found[rank].parameters["w"].detach() for rank in range(RANKS)], dim=dim)
    torch.testing.assert_close(together, alone.parameters["w"].detach(), rtol=0, atol=1e-6)
    assert not torch.allclose(together, weight, atol=1e-3)
    for key, state in alone.tensors().items():
        gone = {"row": len(shape) - 1, "column": len(shape) - 2}.get(key.partition("/")[0])
        parts = [found[rank].tensors()[key] for rank in range(RANKS)]
        if gone == dim:
            assert all(torch.equal(part, parts[0]) for part in parts)
            theirs = parts[0]
        else:
            theirs = torch.cat(parts, dim=dim - (gone is not None and dim > gone))
        torch.testing.assert_close(theirs, state, rtol=1e-6, atol=1e-7)
