"""Regional compilation: every decoder block by itself, so that one compiled block serves all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Let torch compile each block for any number of tokens.

    Before recompute, which then runs the compiled block twice. Without gradients (evaluation, generation with its
    cache) the block runs as it was: other shapes and arguments would be compiled again and again.
    """
    for block in blocks:
        block.forward = _compiled(block.forward, backend=backend)


def _compiled(forward: Callable[..., Any], *, backend: str) -> Callable[..., Any]:
    faster = torch.compile(forward, dynamic=True, backend=backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        return faster(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run
