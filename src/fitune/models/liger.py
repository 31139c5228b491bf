"""Liger's fused kernels in place of transformers' small operations: RMSNorm, gated MLP, rotary positions; and the loss
by one kernel of our own.

Each kernel reads its inputs once and keeps them alone: no fp32 copies in norms, no activated gate, queries and keys
turned where they are. The mixture of experts keeps transformers' grouped products. Only the modules of the given
model change, nothing in transformers itself.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fitune.errors import HardwareError, ModelError, require_library
from fitune.values.model.model_config import spec_from_config
from fitune.values.model.traits import liger_refused_by_model
from fitune.values.plan import Kernels

CrossEntropy = Callable[..., Tensor]
"""(logits [S, V], labels [S], ``scale``, ``softcap``) -> each row's loss in fp32 [S]; the logits become their gradient,
times ``scale``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The kernels that replace transformers' operations; the rehearsal has stand-ins that keep the same tensors."""

    rms_norm: Callable[..., Tensor]
    """x / rms(x) · (weight + ``offset``), with ``eps``, and ``in_fp32`` to the end or not."""
    silu_product: Callable[[Tensor, Tensor], Tensor]
    """silu(gate) · up."""
    gelu_product: Callable[[Tensor, Tensor], Tensor]
    """gelu(gate) · up, by the hyperbolic tangent."""
    silu_halves: Callable[[Tensor], Tensor]
    """silu(first half) · second half of the last dimension."""
    rotate: Callable[..., tuple[Tensor, Tensor]]
    """Queries [B, n, T, d] and keys turned to their positions by cosines and sines [B, T, d]."""
    cross_entropy: CrossEntropy


def use_kernels(model: PreTrainedModel, kernels: Kernels, *, device: torch.device | None = None) -> None:
    """Replace what the family allows. Before adapters, which wrap the linears that stay.

    ``device``: where the model is trained, when that is not where it is.
    Raises ModelError for a model that the kernels do not know, HardwareError without CUDA, MissingExtra without
    liger-kernel.
    """
    if kernels == "torch":
        return
    spec = spec_from_config(model.config.to_dict(), name=f"this {model.config.model_type}")
    refused = liger_refused_by_model(spec)
    if refused is not None:
        raise ModelError(f"kernels: liger do not fit: {refused}", hint="kernels: torch")
    operations = operations_on(device or model.device)
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = _norm(module, operations, gemma=spec.scales_norms_in_fp32)
        elif name.endswith("Attention"):
            module.forward = _with_rotation(module, operations.rotate)
        elif name.endswith("MLP"):
            module.forward = _gated_mlp(module, operations, spec.activation)


def operations_on(device: torch.device) -> Operations:
    """The kernels, or what stands in for them.

    Raises HardwareError where Triton has no device, MissingExtra without liger-kernel.
    """
    if (stand_ins := _stand_ins.get()) is not None:
        return stand_ins
    if device.type != "cuda":
        raise HardwareError(
            f"kernels: liger are Triton kernels and run on CUDA, and the model is on {device.type}",
            hint="kernels: torch",
        )
    return operations_of_liger()


def operations_of_liger() -> Operations:
    """Liger's kernels as operations of a block. Raises MissingExtra without liger-kernel."""
    require_library("liger_kernel.ops", needed_by="kernels: liger", extra="liger")
    from liger_kernel import ops

    from fitune.models.fused_loss import cross_entropy

    def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float, in_fp32: bool) -> Tensor:
        """x / rms(x) · (weight + offset)."""
        # not in place: the gradient that Liger would write over may be the residual stream's
        casting, in_place = "gemma" if in_fp32 else "llama", False
        return ops.LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)

    def silu_halves(both: Tensor) -> Tensor:
        """[..., F] of ``both`` [..., 2 F]."""
        # as a matrix: its backward returns one (0.8.5)
        product: Tensor = ops.LigerFusedGateUpSiLUMulFunction.apply(both.flatten(0, -2))
        return product.unflatten(0, both.shape[:-1])

    return Operations(
        rms_norm=rms_norm,
        silu_product=ops.LigerSiLUMulFunction.apply,
        gelu_product=ops.LigerGELUMulFunction.apply,
        silu_halves=silu_halves,
        rotate=ops.LigerRopeFunction.apply,
        cross_entropy=cross_entropy,
    )


_stand_ins: ContextVar[Operations | None] = ContextVar("_stand_ins", default=None)


@contextmanager
def computing_with(operations: Operations | None) -> Iterator[None]:
    """Models prepared inside take these, if any, instead of Liger's, on any device."""
    token = _stand_ins.set(operations)
    try:
        yield
    finally:
        _stand_ins.reset(token)


def _norm(module: nn.Module, operations: Operations, *, gemma: bool) -> Callable[[Tensor], Tensor]:
    eps = module.eps if gemma else module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        """The module's forward by the kernel."""
        return operations.rms_norm(x, module.weight, eps=eps, offset=float(gemma), in_fp32=gemma)

    return forward


def _gated_mlp(module: nn.Module, operations: Operations, activation: str) -> Callable[[Tensor], Tensor]:
    if hasattr(module, "gate_up_proj"):
        return lambda x: module.down_proj(operations.silu_halves(module.gate_up_proj(x)))
    product = operations.gelu_product if activation == "gelu_pytorch_tanh" else operations.silu_product
    return lambda x: module.down_proj(product(module.gate_proj(x), module.up_proj(x)))


def _with_rotation(module: nn.Module, rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """The attention's own forward, in which one name, transformers' rotation, means another function."""
    written = inspect.unwrap(type(module).forward)  # without what takes keywords by their earlier names
    if "apply_rotary_pos_emb" not in written.__code__.co_names:
        raise ModelError(
            f"kernels: liger: {type(module).__name__} of this transformers does not call apply_rotary_pos_emb",
            hint="kernels: torch",
        )
    names = {**written.__globals__, "apply_rotary_pos_emb": rotate}
    forward = types.FunctionType(
        written.__code__, names, written.__name__, written.__defaults__, written.__closure__
    )
    forward.__kwdefaults__ = written.__kwdefaults__
    return types.MethodType(forward, module)
