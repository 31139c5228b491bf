"""Trade time for memory: blocks that keep only their input and run again in backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fitune.spec.plan import Recompute


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
