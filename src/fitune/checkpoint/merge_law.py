"""The law that a merged model is held to: every weight is W + scaling · B A, within one rounding.

Written out in fp64 and apart from merge.py, so that one cannot repeat the mistake of the other. One matrix is in
memory at a time.
"""

from functools import partial

import torch
from peft import PeftModel
from torch import Tensor

from fitune.checkpoint.merge import (
    Change,
    adapted_layers,
    base_weight,
    base_weights,
    change_of,
    require_plain_lora,
    weight_name,
)
from fitune.checkpoint.parity import Check, is_equal

_SUM_STEPS = 8
"""Roundings of the fp32 sum besides those of the r products: scaling, adding W, and DoRA's division and product."""


def merged_checks(model: PeftModel, dtype: torch.dtype) -> dict[str, Check]:
    """Name in the base -> whether a tensor is what a merge in ``dtype`` must have written under that name.

    Raises CheckpointError for an adapter that cannot be merged.
    """
    layers, adapter = adapted_layers(model), model.active_adapter
    for name, layer in layers.items():
        require_plain_lora(name, layer)
    checks: dict[str, Check] = {
        name: partial(is_equal, tensor, dtype) for name, tensor in base_weights(model).items()
    }
    checks |= {
        weight_name(name, layer): partial(is_merged, base_weight(layer), change_of(layer, adapter))
        for name, layer in layers.items()
    }
    return checks


@torch.no_grad()
def is_merged(before: Tensor, change: Change, stored: Tensor) -> bool:
    """True if ``stored`` is ``before`` changed: M = W + s · B A (DoRA: m · M / ‖M‖ by rows) within one rounding.

    The bound for each element is  ε/2 · |M| + t/2 + (r + 8) · 2⁻²⁴ · (|W| + s · |B| |A|) · g:
    ε the distance of 1 from the next number of the type, so that ε/2 · |M| is what one rounding to the nearest may
    move (2⁻⁸ of a value in bf16, 2⁻¹¹ in fp16); t its smallest number, for values below the normal range; the last
    term is what a sum of r products and 8 steps more loses in fp32 (Higham, Accuracy and Stability of Numerical
    Algorithms, 3.1); g is 1, or m / ‖M‖ where DoRA scales the row by it.
    """
    weight, a, b = (tensor.detach().to("cpu", torch.float64) for tensor in (before, change.a, change.b))
    if change.transposed:
        weight, stored = weight.mT, stored.mT
    if stored.shape != weight.shape or not torch.isfinite(stored).all():
        return False
    rank = a.shape[-2]
    exact = weight + change.scaling * (b @ a)
    size = weight.abs() + abs(change.scaling) * (b.abs() @ a.abs())
    if change.magnitude is not None:
        magnitude = change.magnitude.detach().to("cpu", torch.float64)
        factor = (magnitude / torch.linalg.vector_norm(exact, dim=1))[:, None]
        exact, size = exact * factor, size * factor.abs()
    kind = torch.finfo(stored.dtype)
    bound = kind.eps / 2 * exact.abs() + kind.tiny * kind.eps / 2 + (rank + _SUM_STEPS) * 2.0**-24 * size
    return bool(((stored.to("cpu", torch.float64) - exact).abs() <= bound).all())
