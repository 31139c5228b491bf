"""The table of activations against transformers' functions: what each keeps, makes and moves is counted."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.activations import ACT2FN

from fitune.measure.memory import LiveTensors
from fitune.values.model.traits import ACTIVATIONS
from fitune.values.predictions import Phase

SIZE = 4096
"""Elements of a tensor; constants have far fewer, and masks of booleans a quarter of its bytes."""
NAMES = sorted(ACTIVATIONS.keys() & ACT2FN.keys())


class Traffic(TorchDispatchMode):
    """Tensors that elementwise operations read and write."""

    def __init__(self):
        super().__init__()
        self.moved = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read, storages = large((args, kwargs)), storages_of((args, kwargs))
        made = [x for x in large(out) if x.data_ptr() not in storages]
        if made:
            self.moved += len(read) + len(made)
            self.operations += 1
        return out


class Made(torch.autograd.Function):
    """The tensor before an activation, which nothing else holds."""

    @staticmethod
    def forward(ctx, weight):
        return torch.full((SIZE,), 0.5)

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros(1)


class Read(torch.autograd.Function):
    """The end, which keeps nothing and makes a gradient."""

    @staticmethod
    def forward(ctx, output):
        return output.new_zeros(1)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(SIZE)


def large(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.numel() >= SIZE]


def storages_of(tree):
    return {x.data_ptr() for x in large(tree)}


def start():
    return Made.apply(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("name", NAMES)
def test_what_autograd_keeps(name):
    expected, kept, function = ACTIVATIONS[name], set(), ACT2FN[name]
    held = []

    def keep(x):
        held.append(x)  # else another may get its address
        kept.update(storages_of(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        x = start()
        y = function(x)
    assert (x.data_ptr() in kept) == expected.keeps_input
    assert (y.data_ptr() in kept) == expected.keeps_output
    assert (y.data_ptr() != x.data_ptr()) == expected.makes_output
    assert len(kept - {x.data_ptr(), y.data_ptr()}) == expected.inner


@pytest.mark.parametrize("name", NAMES)
def test_what_is_alive_at_once(name):
    """A mask of booleans may be beside it in backward."""
    expected, function = ACTIVATIONS[name], ACT2FN[name]
    with LiveTensors(()) as memory, torch.no_grad():
        function(start())
    assert memory.peaks[Phase.IDLE] // (4 * SIZE) == expected.forward
    with LiveTensors(()) as memory:
        end = Read.apply(function(start()))
        kept = memory.current_bytes
        memory.enter(Phase.BACKWARD)
        end.backward()
    most = (memory.peaks[Phase.BACKWARD] - kept) / (4 * SIZE)
    assert -0.01 <= expected.backward - most <= 0.5


@pytest.mark.parametrize("name", NAMES)
def test_what_is_moved(name):
    expected, function = ACTIVATIONS[name], ACT2FN[name]
    x, gradient = start(), torch.ones(SIZE)
    with Traffic() as there:
        y = function(x)
    with Traffic() as back:
        torch.autograd.grad(y, x, gradient)
    assert (there.moved, back.moved) == expected.reads_and_writes
    assert (there.operations, back.operations) == expected.operations
