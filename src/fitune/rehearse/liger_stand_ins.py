"""What stands for Liger's kernels on fake tensors, which Triton cannot run on: the same tensors made and kept.

Counted in liger-kernel 0.8.5 (liger_kernel/ops): a norm keeps its input and 4 bytes a row; the gated product keeps
gate and up and writes their gradients over them; positions are turned in place. Nothing is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fitune.models.liger import Operations


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        root = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, root)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return torch.empty_like(gradients[0].contiguous()), of_weight


class _GatedProduct(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        gradients[0].contiguous()
        gate, up = ctx.saved_tensors
        return gate, up


class _ProductOfHalves(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        both = both.contiguous()
        ctx.save_for_backward(both)
        return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        return torch.empty_like(both)


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _tokens_first(query), _tokens_first(key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _tokens_first(gradients[0]), _tokens_first(gradients[1]), None, None


def _tokens_first(heads_BnTd: Tensor) -> Tensor:
    """Written over, or over a copy where heads lie before tokens."""
    return heads_BnTd.transpose(1, 2).contiguous().transpose(1, 2)


def _rms_norm(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
    y: Tensor = _RmsNorm.apply(x, weight)
    return y


LIGER_STAND_INS = Operations(
    rms_norm=_rms_norm,
    silu_product=_GatedProduct.apply,
    gelu_product=_GatedProduct.apply,
    silu_halves=_ProductOfHalves.apply,
    rotate=_Rotation.apply,
)
