"""The decoder blocks of a model: found, recomputed in backward to save memory, compiled one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fitune.errors import ModelError
from fitune.spec.plan import Recompute


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model without adapters."""
    return decoder_blocks(model.base_model, count=model.config.get_text_config().num_hidden_layers)


def decoder_blocks(body: nn.Module, *, count: int) -> nn.ModuleList:
    """The list of ``count`` blocks in the body, whatever the family calls it."""
    lists = [m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise ModelError(f"{type(body).__name__}: expected one list of {count} blocks, found {len(lists)}")
    return lists[0]


def recompute_blocks(blocks: Sequence[nn.Module], recompute: Recompute, *, has_dropout: bool) -> None:
    """Make the first ``recompute.blocks`` blocks recompute (Chen et al. 2016, arXiv 1604.06174).

    Random numbers are replayed only when there is dropout to replay.
    """
    for block in blocks[: recompute.blocks]:
        block.forward = _recomputed(block.forward, replay_random=has_dropout)


def _recomputed(forward: Callable[..., Any], *, replay_random: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=replay_random, **kwargs)

    return run


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
