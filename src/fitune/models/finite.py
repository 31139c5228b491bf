"""Weights that are numbers."""

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from fitune.errors import ModelError

_SHOWN = 5


def require_finite(model: nn.Module, path: str) -> None:
    """Raises ModelError naming weights that are NaN or infinite: such a model answers, and every answer is noise."""
    # scales are buffers
    bad = not_finite(dict(chain(model.named_parameters(), model.named_buffers())))
    if bad:
        raise ModelError(
            f"{path}: weights are NaN or infinite: {first_of(bad)}",
            hint="fetch the model again, or take an earlier checkpoint of it",
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity.

    The largest magnitude of each decides: it is NaN when any element is, and costs no second tensor on the device.
    """
    checked = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.numel()
    }
    largest = {name: torch.linalg.vector_norm(tensor, ord=float("inf")) for name, tensor in checked.items()}
    return [name for name, value in largest.items() if not torch.isfinite(value)]


def first_of(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
