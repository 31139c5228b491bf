"""Experts of a mixture, stacked as [experts, out, in], with weights in few bits or with adapters.

transformers holds the experts of a block as two parameters and multiplies all tokens by all of them in one grouped
product (transformers.integrations.moe). The same happens here, but that a packed stack is made dense for its product
alone, forward and backward, and that adapters add their own two thin products.

Shapes: T tokens, K experts for each, S = T · K pairs of token and expert in the order of experts, E experts.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitune.models.low_bit.quantised import PackedWeight

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names under which transformers' experts hold their matrices; ``up_proj`` where there is no gate."""


def is_experts(module: nn.Module) -> bool:
    """True for experts that any implementation of transformers' experts interface can run."""
    return (
        hasattr(module, "is_transposed")
        and hasattr(module, "_apply_gate")
        and any(len(stack_shape(module, name) or ()) == 3 for name in STACKS)
    )


def stack_shape(experts: nn.Module, name: str) -> torch.Size | None:
    """Shape of a stack, packed or not; None where there is none of that name."""
    held: PackedWeight | Tensor | None = packed_stack_of(experts, name)
    if held is None:
        held = experts._parameters.get(name)
    return None if held is None else held.shape


def hold_packed(experts: nn.Module, name: str, packed: PackedWeight) -> None:
    """Put ``packed`` in the place of the parameter ``name``.

    Under another name: PEFT adapts what is called ``down_proj``, and this is no linear.
    """
    experts.register_parameter(name, None)
    experts.add_module(f"packed_{name}", packed.train(experts.training))
    experts.forward = MethodType(_forward, experts)


def packed_stack_of(experts: nn.Module, name: str) -> PackedWeight | None:
    """The packed stack in the place of the parameter ``name``; None where there is none."""
    found = experts._modules.get(f"packed_{name}")
    return found if isinstance(found, PackedWeight) else None


Pair = Callable[[], tuple[Tensor, Tensor, float] | None]
"""The adapter of a stack: A [E, r, in], B [E, out, r] and what their product is scaled by; None while it is off."""


def run_by(experts: nn.Module, name: str, pair: Pair) -> None:
    """Let ``pair`` adapt the stack ``name``."""
    experts.__dict__.setdefault("adapters", {})[name] = pair
    experts.forward = MethodType(_forward, experts)


def _forward(experts: Any, hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it."""
    tokens, per_token = chosen_TK.shape
    numbers_S, order_S = torch.sort(chosen_TK.reshape(-1))
    every_E = torch.arange(experts.num_experts, device=numbers_S.device)
    # pairs up to and with each expert
    ends_E = torch.searchsorted(numbers_S, every_E, right=True).to(torch.int32)
    x_SD = hidden_TD[order_S // per_token]
    if hasattr(experts, "gate_up_proj"):
        x_SF = experts._apply_gate(_product(experts, "gate_up_proj", x_SD, ends_E, numbers_S))
    else:
        x_SF = experts.act_fn(_product(experts, "up_proj", x_SD, ends_E, numbers_S))
    del x_SD  # where nothing trains, nobody else holds it
    out_SD = _product(experts, "down_proj", x_SF, ends_E, numbers_S)
    del x_SF
    if getattr(experts, "has_post_expert_norm", False):
        out_SD = experts.post_expert_norm(out_SD)
    weighted_SD = out_SD * weights_TK.reshape(-1)[order_S].unsqueeze(-1)
    del out_SD
    of_tokens_SD = weighted_SD[order_S.argsort()]
    del weighted_SD
    return of_tokens_SD.view(tokens, per_token, -1).sum(dim=1).to(hidden_TD.dtype)


def _product(experts: nn.Module, name: str, x_SI: Tensor, ends_E: Tensor, numbers_S: Tensor) -> Tensor:
    stack = packed_stack_of(experts, name)
    if stack is None:
        whole = experts.get_parameter(name)
        out_SO = grouped_product(x_SI, whole if experts.is_transposed else whole.mT, ends_E)
    else:
        out_SO = _FrozenGroupedProduct.apply(x_SI, ends_E, stack, experts.is_transposed)
    pair = experts.__dict__.get("adapters", {}).get(name)
    if pair is not None and (factors := pair()) is not None:
        a_ERI, b_EOR, scaling = factors
        low_SR = grouped_product(x_SI, a_ERI.mT, ends_E) * scaling
        out_SO = out_SO.add_(grouped_product(low_SR, b_EOR.mT.contiguous(), ends_E))
    bias_EO = experts._parameters.get(f"{name}_bias")
    return out_SO if bias_EO is None else out_SO + bias_EO[numbers_S]


class _FrozenGroupedProduct(torch.autograd.Function):
    """Every pair times its expert's matrix, which is made whole again in backward: nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, ends_E: Tensor, stack: PackedWeight, is_transposed: bool) -> Tensor:
        """[S, O] of pairs [S, I] in the order of their experts; ``ends_E`` are where each expert's pairs end."""
        ctx.ends_E, ctx.stack, ctx.is_transposed = ends_E, stack, is_transposed
        whole = stack.dequantised()
        return grouped_product(x_SI, whole if is_transposed else whole.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, gradient_SO: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient [S, I] for the pairs; the weights are frozen."""
        whole = ctx.stack.dequantised()
        whole_EOI = whole.mT if ctx.is_transposed else whole
        return grouped_product(gradient_SO.contiguous(), whole_EOI, ctx.ends_E), None, None, None


def grouped_product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of x up to each expert's end times its matrix, [S, O]."""
    if x_SI.device.type == "cuda":
        # from Ampere on for rows of whole 16 bytes, which the ranks of adapters may not be
        whole = all(width * x_SI.itemsize % 16 == 0 for width in weight_EIO.shape[-2:])
        if not whole or torch.cuda.get_device_capability(x_SI.device) < (8, 0):
            return _one_by_one(x_SI, weight_EIO, ends_E)
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm  # before torch 2.10
    return grouped(x_SI, weight_EIO, offs=ends_E)


def _one_by_one(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The grouped product as one product for each expert, where the GPU has no kernel for it."""
    ends = ends_E.tolist()
    begins = [0, *ends[:-1]]
    return torch.cat([x_SI[a:b] @ weight_EIO[e] for e, (a, b) in enumerate(zip(begins, ends, strict=True))])
