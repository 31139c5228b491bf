"""The law that a merged model is held to: every weight is W + scaling · B A, within one rounding.

Written out in fp64 and apart from merge.py, so that one cannot repeat the mistake of the other. A few rows are in
memory at a time.
"""

from dataclasses import replace
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
_ROWS = 32
"""Rows at once: what is in a processor's cache is not fetched again for each of a dozen operations."""


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

    The bound for each element is  ε/2 · |M| + t/2 + (r + 8) · 2⁻²⁴ · (|W| + s · ‖Bᵢ‖ ‖Aⱼ‖) · g:
    ε the distance of 1 from the next number of the type, so that ε/2 · |M| is what one rounding to the nearest may
    move (2⁻⁸ of a value in bf16, 2⁻¹¹ in fp16); t its smallest number, for values below the normal range; the last
    term is what a sum of r products and 8 steps more loses in fp32 (Higham, Accuracy and Stability of Numerical
    Algorithms, 3.1; |B| |A| ≤ ‖Bᵢ‖ ‖Aⱼ‖); g is 1, or m / ‖M‖ where DoRA scales the row by it.
    """
    if change.transposed:
        before, stored, change = before.mT, stored.mT, replace(change, transposed=False)
    if stored.shape != before.shape:
        return False
    if before.ndim == 3:
        experts = zip(before, change.a, change.b, stored, strict=True)
        return all(is_merged(weight, replace(change, a=a, b=b), made) for weight, a, b, made in experts)
    a, b = (factor.detach().to("cpu", torch.float64) for factor in (change.a, change.b))
    magnitude = (
        None if change.magnitude is None else change.magnitude.detach().to("cpu", torch.float64).view(-1)
    )
    lost, kind = (len(a) + _SUM_STEPS) * 2.0**-24, torch.finfo(stored.dtype)
    width = torch.linalg.vector_norm(a, dim=0) * abs(change.scaling)
    for first in range(0, len(before), _ROWS):
        rows = slice(first, first + _ROWS)
        weight, made = (tensor[rows].detach().to("cpu", torch.float64) for tensor in (before, stored))
        exact = torch.addmm(weight, b[rows], a, alpha=change.scaling)
        bound = weight.abs_().addr_(torch.linalg.vector_norm(b[rows], dim=1), width).mul_(lost)
        if magnitude is not None:
            factor = (magnitude[rows] / torch.linalg.vector_norm(exact, dim=1))[:, None]
            exact, bound = exact.mul_(factor), bound.mul_(factor.abs())
        made.sub_(exact).abs_()
        bound.add_(exact.abs_(), alpha=kind.eps / 2).add_(kind.tiny * kind.eps / 2)
        if not (made <= bound).all():  # also refuses what is not finite
            return False
    return True
