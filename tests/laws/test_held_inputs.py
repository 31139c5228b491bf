"""Why FSDP1 over frozen blocks needs twice the kept inputs: its hook, alone, on a CPU."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, BLOCKS = 64, 32, 16


class FrozenWithAdapter(nn.Module):
    """``hooked``: reshards as FullyShardedDataParallel does it where no parameter of the unit itself is trained."""

    def __init__(self, *, hooked):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.hooked = hooked

    def forward(self, hidden_TH):
        if self.hooked and hidden_TH.requires_grad:
            register_multi_grad_hook((hidden_TH,), lambda gradients: None)
        return hidden_TH + self.base(torch.nn.functional.silu(self.up(self.down(hidden_TH))))


class LiveStreams(TorchDispatchMode):
    """Counts the living storages of the residual stream's size."""

    def __init__(self):
        super().__init__()
        self.live = set()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in self._streams(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self.live.add(key)
                weakref.finalize(storage, self.live.discard, key)
        self.most = max(self.most, len(self.live))
        return out

    def _streams(self, out):
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() == TOKENS * WIDTH * 4:
                yield leaf


def most_alive(*, hooked, reentrant):
    blocks = [FrozenWithAdapter(hooked=hooked) for _ in range(BLOCKS)]
    hidden_TH = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with LiveStreams() as streams:
        for block in blocks:
            hidden_TH = checkpoint(block, hidden_TH, use_reentrant=reentrant)
        hidden_TH.sum().backward()
    return streams.most


def test_a_reentrant_checkpoint_around_the_hook_holds_inputs_and_their_gradients():
    plain = most_alive(hooked=False, reentrant=True)
    held = most_alive(hooked=True, reentrant=True)
    assert held - plain == pytest.approx(BLOCKS, abs=3)
    assert held >= 2 * BLOCKS


def test_without_reentrance_nothing_more_is_held():
    assert most_alive(hooked=True, reentrant=False) <= most_alive(hooked=False, reentrant=False) + 1
