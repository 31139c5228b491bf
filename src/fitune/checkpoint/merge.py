"""The weights of a model with its adapters folded in; the model itself is left as it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from fitune.errors import CheckpointError
from fitune.models.expert_adapters import pairs_of_experts
from fitune.models.low_bit.quantised import PackedWeight


def merged_weights(model: PeftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The base's state dict in ``dtype``, with W + scaling · B A in place of every adapted W, under the base's names.

    DoRA's rows are then scaled to the length that it trained (Liu et al. 2024, arXiv 2402.09353, eq. 5).

    Merged matrices are new and on the host, one after the other, so the device holds one update at a time;
    everything else is the model's own storage where it has that type, tied weights included. The sum is made in
    fp32 and rounded once to ``dtype``. (Merging in place and subtracting again would not give W back bit for bit.)
    Raises CheckpointError for a quantised base and for adapters that are neither LoRA nor DoRA.
    """
    refuse_quantised_base(model)
    layers = adapted_weights(model)
    weights = in_dtype({n: t for n, t in base_weights(model).items() if n not in layers}, dtype)
    for name, layer in layers.items():
        require_plain_lora(name, layer)
        weights[name] = merged(base_weight(layer), change_of(layer, model.active_adapter), dtype)
    return weights


def base_weights(model: PeftModel) -> dict[str, Tensor]:
    """The base's state dict without adapters, under the names that it has without them."""
    return {
        without_layers(name): tensor
        for name, tensor in model.get_base_model().state_dict().items()
        if ".lora_" not in name
    }


def adapted_layers(model: PeftModel) -> dict[str, LoraLayer]:
    """Name of a linear in the base -> the layer that adapts it."""
    named = model.get_base_model().named_modules()
    return {name: module for name, module in named if isinstance(module, LoraLayer)}


def adapted_weights(model: PeftModel) -> dict[str, LoraLayer]:
    """Name of a weight in the base -> the layer that adapts it: a linear's, or a stack of experts."""
    return {weight_name(name, layer): layer for name, layer in adapted_layers(model).items()}


def weight_name(name: str, layer: LoraLayer) -> str:
    """The base's name of what the layer ``name`` adapts. PEFT puts the layers of one module's stacks around it."""
    if isinstance(layer, ParamWrapper):
        return f"{without_layers(name + '.')}{layer.parameter_name}"
    return f"{name}.weight"


def without_layers(name: str) -> str:
    """``name`` of a tensor as it is in the base, without the layers around its module."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


def base_weight(layer: LoraLayer) -> Tensor:
    """The weight that ``layer`` adapts, as it is."""
    found: Tensor = layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
    return found


def in_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors in ``dtype``, what has to change on the host; two names of one tensor stay two names of one."""
    cast: dict[tuple[torch.device, int], Tensor] = {}
    for tensor in weights.values():
        place = tensor.device, tensor.data_ptr()
        if place not in cast:
            changes = tensor.is_floating_point() and tensor.dtype != dtype
            cast[place] = tensor.detach().to("cpu", dtype) if changes else tensor
    return {name: cast[tensor.device, tensor.data_ptr()] for name, tensor in weights.items()}


def refuse_quantised_base(model: PeftModel) -> None:
    """Raises CheckpointError when adapters sit on quantised linears: rounding again would lose what they learned."""
    base = model.get_base_model()
    config = getattr(base.config, "quantization_config", None)
    layers = adapted_layers(model)
    narrow = [name for name, layer in layers.items() if not _holds_wide_floats(layer.get_base_layer())]
    if config is not None or narrow:
        method = (
            config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
        )
        found = method or f"{narrow[0]} holds no 16-bit or wider floats"
        raise CheckpointError(
            f"export: merged would fold the adapter into a quantised base ({found}) and round it away",
            hint="export: adapter, then merge that adapter into the 16-bit base",
        )


def _holds_wide_floats(layer: nn.Module) -> bool:
    if isinstance(layer, PackedWeight):
        return False
    weights = [parameter.dtype for parameter in layer.parameters(recurse=False)]
    return all(dtype.is_floating_point and dtype.itemsize >= 2 for dtype in weights)


def require_plain_lora(name: str, layer: LoraLayer) -> None:
    if (
        not isinstance(layer, LoraLinear | ParamWrapper)
        or set(layer.lora_variant) - set(layer.lora_magnitude_vector)
        or any(layer.lora_bias.values())
        or layer.merged
    ):
        raise CheckpointError(
            f"{name.removesuffix('.weight')}: only LoRA and DoRA on a linear, not merged yet, can be merged here",
            hint="export: adapter",
        )


def stores_transposed(layer: LoraLayer) -> bool:
    """True for GPT-2's linears and gpt-oss's experts, which keep their weights as [in, out]."""
    if isinstance(layer, ParamWrapper):
        return _is_stack(layer) and bool(getattr(layer.get_base_layer(), "is_transposed", False))
    return bool(getattr(layer, "fan_in_fan_out", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The change of one weight by an adapter: W + scaling · B A, with DoRA's lengths of the rows.

    Of a stack of experts ``a`` and ``b`` are stacks too.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None
    """None for LoRA."""
    transposed: bool
    """True where the weight is stored as [in, out]."""


def change_of(layer: LoraLayer, adapter: str) -> Change:
    """The change that an adapter makes, on its own storage."""
    magnitudes = layer.lora_magnitude_vector
    a, b = factors_of(layer, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
    return Change(
        a=a,
        b=b,
        scaling=layer.scaling[adapter],
        magnitude=magnitudes[adapter].weight if adapter in magnitudes else None,
        transposed=stores_transposed(layer),
    )


def factors_of(layer: LoraLayer, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A and B as they are multiplied: of a stack, those of each expert."""
    if isinstance(layer, ParamWrapper) and _is_stack(layer):
        return pairs_of_experts(a, b, layer.num_experts)
    return a, b


def _is_stack(layer: ParamWrapper) -> bool:
    """False for a single matrix that PEFT wraps as a parameter too, such as a router's."""
    found: bool = layer.get_param().ndim == 3
    return found


@torch.no_grad()
def merged(weight: Tensor, change: Change, dtype: torch.dtype) -> Tensor:
    """``weight`` changed, summed in fp32 on its device and rounded once to ``dtype``; on the host."""
    update = change.b.float() @ change.a.float()
    update *= change.scaling
    if change.transposed:
        update = update.mT
    update += weight
    if change.magnitude is not None:
        row = 0 if change.transposed else 1
        lengths = torch.linalg.vector_norm(update, dim=row, keepdim=True, dtype=torch.float64)
        update *= (change.magnitude.view_as(lengths) / lengths).float()
    return update.to(dtype=dtype, device="cpu")
