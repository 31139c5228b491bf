"""An export read back and held against the model in memory: every weight, then logits on fixed tokens.

Reloading needs the weights a second time, on the device when they fit there and else on the host. Where they fit
nowhere the files are compared tensor by tensor, and a warning says that logits were not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from fitune.checkpoint import parity
from fitune.checkpoint.parity import Check
from fitune.checkpoint.routing import Routes, fixed_routes, has_routers, recorded_routes
from fitune.errors import is_out_of_memory

Model = PreTrainedModel | PeftModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of a verification; ``difference`` and ``found`` are None where logits could not be compared."""

    trained: Tensor
    found: Tensor | None = None
    difference: float | None = None
    warnings: tuple[str, ...] = ()


def verify(
    model: Model,
    folder: Path,
    checks: Mapping[str, Check],
    *,
    reload: Callable[[str], Any],
    weights_of: Callable[[Any], Mapping[str, Tensor]],
    dtypes: Sequence[torch.dtype],
    slack: float = 1.0,
    on_reloaded: Callable[[PreTrainedModel], None] | None = None,
) -> Verified:
    """Compare what ``reload`` (given the name of an attention) makes of ``folder`` with ``model``.

    ``checks`` say of each of its ``weights_of`` whether it is right; ``dtypes`` are those of the files.
    ``slack`` widens what is allowed to logits, where weights were rounded on the way.
    Raises CheckpointError naming the weights that are wrong, or when logits differ by more than rounding explains.
    """
    with parity.plain_attention(model) as attention, recorded_routes(model) as routes:
        trained = parity.logits(model)
        try:
            reloaded = reload(attention)
            parity.require_same_weights(weights_of(reloaded), checks)
            compared = _compared(reloaded, trained, routes, _coarsest(model, dtypes), slack)
            if on_reloaded is not None:
                on_reloaded(reloaded)
            return compared
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    count = parity.require_same_files(folder, checks)
    warning = (
        f"not verified by reloading, for there is no memory for a second copy ({reason}); "
        f"{count} tensors in the files were compared one by one and are right"
    )
    return Verified(trained=trained, warnings=(warning,))


def _compared(reloaded: Model, trained: Tensor, routes: Routes, dtype: torch.dtype, slack: float) -> Verified:
    if has_routers(reloaded) and not routes:
        warning = (
            "logits are not compared: the experts that tokens take cannot be fixed; every weight is right"
        )
        return Verified(trained=trained, warnings=(warning,))
    with fixed_routes(reloaded, routes):
        found = parity.logits(reloaded)
    difference = parity.require_close(found, trained, dtype, slack=slack)
    return Verified(trained=trained, found=found, difference=difference)


def reload_device(model: Model) -> torch.device:
    """The model's own device, so that the same kernels answer, unless a second copy does not fit there."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return device
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return device if free > 1.2 * needed else torch.device("cpu")


def _coarsest(model: Model, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The floating type with the coarsest steps among the trained and the exported weights."""
    trained = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    return max((*trained, *dtypes), key=lambda dtype: torch.finfo(dtype).eps)
