"""Weights that are numbers."""

from itertools import chain

import torch
from torch import nn

from fitune.errors import ModelError

_SHOWN = 5


def require_finite(model: nn.Module, path: str) -> None:
    """Raises ModelError naming weights that are NaN or infinite: such a model answers, and every answer is noise."""
    bad = [
        name
        for name, weight in chain(model.named_parameters(), model.named_buffers())  # scales are buffers
        if weight.is_floating_point() and not torch.isfinite(weight).all()
    ]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ModelError(
            f"{path}: weights are NaN or infinite: {', '.join(bad[:_SHOWN])}{more}",
            hint="fetch the model again, or take an earlier checkpoint of it",
        )
