"""8-bit AdamW is bitsandbytes' own bit for bit, remembers in tensors alone, and names its extra."""

import sys

import pytest
import torch
from torch.nn import Parameter

from fitune.engine.optimizers import DirectOptimizer, EightBitAdamW, MasterOptimizer
from fitune.errors import MissingExtra
from fitune.values.plan import AdamW8bit

bitsandbytes = pytest.importorskip("bitsandbytes")

CHOICE = AdamW8bit(beta2=0.99, weight_decay=0.1)


def parameters(dtype=torch.float32):
    """A matrix of several blocks and a rest, a small matrix and a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (70, 65), "small": (8, 16), "vector": (5000,)}
    return {
        name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()
    }


def set_gradients(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_librarys_bit_for_bit(dtype):
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = DirectOptimizer(ours, CHOICE)
    assert isinstance(optimizer.torch_optimizer, EightBitAdamW)
    groups = [
        {"params": [theirs["matrix"], theirs["small"]], "weight_decay": 0.1},
        {"params": [theirs["vector"]], "weight_decay": 0.0},
    ]
    library = bitsandbytes.optim.AdamW8bit(groups, lr=0.01, betas=(0.9, 0.99))
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step(learning_rate=0.01, gradient_factor=1.0)
        library.step()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), (step, name)


def test_more_elements_than_the_kernel_counts_are_stepped_part_by_part(monkeypatch):
    ours, whole = parameters(), parameters()
    optimizers = [DirectOptimizer(weights, CHOICE) for weights in (whole, ours)]
    for step in range(2):
        for weights, optimizer, most in zip((whole, ours), optimizers, (2**30, 1024), strict=True):
            monkeypatch.setattr("fitune.engine.optimizers._MOST_COUNTED", most)
            set_gradients(weights, step)
            optimizer.step(learning_rate=0.01, gradient_factor=1.0)
    for name, weight in ours.items():
        assert torch.equal(weight, whole[name]), name


@pytest.mark.parametrize("kind", [DirectOptimizer, MasterOptimizer])
def test_restored_it_goes_on_bit_for_bit(kind):
    weights = parameters(torch.bfloat16)
    optimizer = kind(weights, CHOICE)
    for step in range(2):
        set_gradients(weights, step)
        optimizer.step(learning_rate=0.01, gradient_factor=1.0)
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    copies = {name: Parameter(weight.detach().clone()) for name, weight in weights.items()}
    again = kind(copies, CHOICE)
    set_gradients(copies, 0)  # what it has counted so far is forgotten
    again.step(learning_rate=0.0, gradient_factor=1.0)
    again.restore(saved)
    for step in range(2, 5):
        for each, which in ((weights, optimizer), (copies, again)):
            set_gradients(each, step)
            which.step(learning_rate=0.01, gradient_factor=1.0)
    for name, weight in weights.items():
        assert torch.equal(weight, copies[name])


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtra, match=r"fitune\[quant\]"):
        DirectOptimizer(parameters(), CHOICE)
