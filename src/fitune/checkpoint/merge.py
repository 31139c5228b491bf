"""Adapters folded into their base: W + scaling · B A, and the law that what was written is held to.

The sum is made in fp32 and rounded once. The law is written out in fp64 and apart from it, so that one cannot repeat
the mistake of the other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from fitune.errors import CheckpointError
from fitune.models.adapter_file import PREFIX
from fitune.models.expert_adapters import pairs_of_experts
from fitune.models.experts import stack_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """The change of one weight by an adapter: W + scaling · B A, with DoRA's lengths of the rows.

    Of a stack of experts ``a`` and ``b`` are stacks too.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None
    """None for LoRA."""
    transposed: bool
    """True where the weight is stored as [in, out]: GPT-2's linears and gpt-oss's experts."""


def changes_of(model: PeftModel, weights: Mapping[str, Tensor] | None = None) -> dict[str, WeightChange]:
    """Name of a weight in the base -> what the adapter does to it; ``weights``: in place of the model's own.

    Raises CheckpointError for adapters that are neither LoRA nor DoRA.
    """
    adapter, found = model.active_adapter, {}
    held = weights if weights is not None else dict(model.named_parameters())
    for name, layer in model.get_base_model().named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if (
            not isinstance(layer, LoraLinear | ParamWrapper)
            or set(layer.lora_variant) - set(layer.lora_magnitude_vector)
            or any(layer.lora_bias.values())
            or layer.merged
        ):
            raise CheckpointError(
                f"{name}: only LoRA and DoRA on a linear, not merged yet, can be merged here",
                hint="export: adapter",
            )
        a, b = (held[f"{PREFIX}{name}.lora_{part}.{adapter}.weight"] for part in "AB")
        transposed, target = bool(getattr(layer, "fan_in_fan_out", False)), f"{name}.weight"
        if isinstance(layer, ParamWrapper):  # PEFT puts the layers of one module's stacks around it
            module, parameter = layer.get_base_layer(), layer.parameter_name
            # else a single matrix, such as a router's
            is_stack = len(stack_shape(module, parameter) or ()) == 3
            transposed = is_stack and bool(getattr(module, "is_transposed", False))
            target = f"{without_layers(name + '.')}{parameter}"
            a, b = pairs_of_experts(a, b, layer.num_experts) if is_stack else (a, b)
        magnitude = held.get(f"{PREFIX}{name}.lora_magnitude_vector.{adapter}.weight")
        found[target] = WeightChange(
            a=a, b=b, scaling=layer.scaling[adapter], magnitude=magnitude, transposed=transposed
        )
    return found


def without_layers(name: str) -> str:
    """``name`` of a tensor as it is in the base, without the layers around its module."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


@torch.no_grad()
def merged(weight: Tensor, change: WeightChange, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """``weight`` changed, summed in fp32 on its device and rounded once to ``dtype``, on the host; with the squares of
    what was learned and of what the rounding took. DoRA: Liu et al. 2024, arXiv 2402.09353, eq. 5.
    """
    exact = change.b.float() @ change.a.float()
    exact *= change.scaling
    if change.transposed:
        exact = exact.mT
    exact += weight
    if change.magnitude is not None:
        row = 0 if change.transposed else 1
        lengths = torch.linalg.vector_norm(exact, dim=row, keepdim=True, dtype=torch.float64)
        exact *= (change.magnitude.view_as(lengths) / lengths).float()
    rounded = exact.to(dtype)
    learned, lost = ((exact - other).square_().sum().item() for other in (weight, rounded))
    return rounded.cpu(), learned, lost


_SUM_STEPS = 8
"""Roundings of the fp32 sum besides those of the r products: scaling, adding W, and DoRA's division and product."""
_ROWS = 32
"""Rows at once: what is in a processor's cache is not fetched again for each of a dozen operations."""


@torch.no_grad()
def is_merged(before: Tensor, change: WeightChange, stored: Tensor) -> bool:
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
