"""Answers for a step on fake tensors: what depends on data, on the device that is stood for, or on Triton.

Liger's kernels are stood for by functions that make and keep the same tensors and compute nothing. Counted in
liger-kernel 0.8.5 (liger_kernel/ops): a norm keeps its input and 4 bytes a row; the gated product keeps gate and up and
writes their gradients over them; positions are turned in place.

Shapes: B rows, n heads, k key heads, T tokens, d head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fitune.errors import ModelError
from fitune.models.liger import Operations
from fitune.values.machines.hardware import Gpu

_aten = torch.ops.aten

_LARGE_NORM = 1e9
"""Every number that a step reads is the gradients' norm: large, so that clipping is rehearsed too."""

# The fake CPU's fused kernel stands for CUDA's: the same inputs, output and log-sum-exp are kept.
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH_STREAM_BACKWARD = _aten._flash_attention_backward.default
_SOFTMAX_BACKWARD = _aten._softmax_backward_data.default
_TABLE_BACKWARD = _aten.embedding_dense_backward.default


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """Answers for one plan: ``gpu`` it is for, and how many tokens have labels."""

    gpu: Gpu
    supervised_tokens: int

    def instead_of(self, func: Any) -> Callable[..., Any]:
        """The operation itself, or what answers in its place."""
        if func is _aten._local_scalar_dense.default:
            return lambda tensor: _LARGE_NORM
        if func is _aten.nonzero.default:
            return self._supervised_positions
        if func is _aten._grouped_mm.default:
            return _grouped_product
        if func._schema.name in _UPDATES_IN_PLACE:
            return lambda *_, **__: None
        return func

    def workspace_bytes(self, func: Any, args: Any) -> int:
        """Bytes that a CUDA kernel allocates inside its backward, where no trace can look.

        FlashAttention-2: the fp32 gradient of the queries, padded to 128 tokens (for a stream by 128 tokens a row),
        and a sum per query; with grouped heads also the gradients of keys and values for every query
        head, before they are added up (flash_api.cpp, mha_bwd and mha_varlen_bwd: dq_accum, softmax_d, dk_expanded,
        dv_expanded). The memory-efficient kernel accumulates alike. Softmax: gradient times output (SoftMax.cu).
        An embedding: ``_table_workspace``. Read in the sources, and seen on the null GPU.
        """
        if func is _FLASH_STREAM_BACKWARD:
            query_Tnd, key_Tkd, bounds = args[1], args[2], args[6]
            tokens, heads, _ = query_Tnd.shape
            padded = tokens + 128 * (len(bounds) - 1)
            return _flash_workspace(query_Tnd, padded=padded, grouped=key_Tkd.shape[1] != heads, heads=heads)
        if self.gpu.is_cpu:
            return 0
        if func is _SOFTMAX_BACKWARD:
            return int(args[0].numel() * args[0].element_size())
        if func is _TABLE_BACKWARD:
            return _table_workspace(args[0].shape[-1], tokens=args[1].numel(), rows=args[2])
        if func is not _FLASH_BACKWARD:
            return 0
        query_BnTd, key_BkTd = args[1], args[2]
        B, n, T, _ = query_BnTd.shape
        padded = B * -(-T // 128) * 128
        return _flash_workspace(query_BnTd, padded=padded, grouped=key_BkTd.shape[1] != n, heads=n)

    def _supervised_positions(self, mask: Tensor) -> Tensor:
        """The models' only data-dependent shape: the positions that have a label."""
        if mask.dim() != 1:
            raise ModelError(
                f"the model calls nonzero() on a tensor of {mask.dim()} dimensions: the result's size depends on "
                "the data, so its step cannot be rehearsed",
                hint="`fitune plan` estimates it",
            )
        return torch.empty((self.supervised_tokens, 1), dtype=torch.int64)


def _flash_workspace(query: Tensor, *, padded: int, grouped: bool, heads: int) -> int:
    """4 · n · padded · (d + 1), and 2 · e · T · n · d for grouped heads."""
    accumulated = 4 * heads * padded * (query.shape[-1] + 1)
    return accumulated + (2 * query.numel() * query.element_size() if grouped else 0)


def _table_workspace(width: int, *, tokens: int, rows: int) -> int:
    """4 · width · s for s = ⌊tokens / 10⌋ + min(tokens, rows) partial sums in fp32, and indices of 8 bytes: three a
    token, two a row that may be met, one a sum. Up to 3,072 tokens are added up in place (Embedding.cu and
    EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel)."""
    if tokens <= 3072:
        return 0
    met = min(tokens, rows)
    sums = tokens // 10 + met
    return 4 * width * sums + 8 * (3 * tokens + 2 * met + sums)


def _grouped_product(one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Products of groups of rows; the fake kernel would refuse every dtype but bf16, the real ones do not."""
    if one.dim() == 2 and other.dim() == 2:
        assert offs is not None
        return one.new_empty((len(offs), one.shape[0], other.shape[1]))
    if one.dim() == 2:
        return one.new_empty((one.shape[0], other.shape[2]))
    return one.new_empty((*one.shape[:-1], other.shape[-1]))


_UPDATES_IN_PLACE = ("aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_")
"""They write over what they are given and allocate nothing, whatever their fake kernels say."""


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The shape of ``x``; saves x, weight and one fp32 number a row."""
        x = x.contiguous()
        root = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, root)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the shapes of x and weight; None for a frozen weight."""
        _, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return torch.empty_like(gradients[0].contiguous()), of_weight


class _GatedProduct(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """The shape of ``gate``; saves both inputs."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """The kernel writes both gradients over its saved inputs."""
        gradients[0].contiguous()
        gate, up = ctx.saved_tensors
        return gate, up


class _ProductOfHalves(Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """[..., F] of [..., 2 F]; saves its input."""
        both = both.contiguous()
        ctx.save_for_backward(both)
        return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """A new gradient [..., 2 F]."""
        (both,) = ctx.saved_tensors
        return torch.empty_like(both)


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Query and key, copied only where tokens are not first in memory; saves cos and sin."""
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _tokens_first(query), _tokens_first(key)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query and key; none for cos and sin."""
        return _tokens_first(gradients[0]), _tokens_first(gradients[1]), None, None


def _tokens_first(heads_BnTd: Tensor) -> Tensor:
    """Written over, or over a copy where heads lie before tokens."""
    return heads_BnTd.transpose(1, 2).contiguous().transpose(1, 2)


LIGER_STAND_INS = Operations(
    rms_norm=lambda x, weight, **_: _RmsNorm.apply(x, weight),
    silu_product=_GatedProduct.apply,
    gelu_product=_GatedProduct.apply,
    silu_halves=_ProductOfHalves.apply,
    rotate=_Rotation.apply,
    cross_entropy=lambda logits_SV, labels_S, **_: logits_SV.new_empty(len(labels_S), dtype=torch.float32),
)


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Inside, dropout and softmax keep what CUDA's kernels keep.

    On CUDA dropout is one kernel with a mask of one byte per element (aten::native_dropout); the CPU multiplies by a
    mask of the input's dtype. CUDA's fused attention drops out by itself, from a seed; the CPU's cannot, and the
    scores would be written out. CUDA's softmax in fp32 reads fp16 itself, the CPU's a copy. The functions themselves
    are replaced: a TorchFunctionMode is off in backward, where recomputed blocks run again.
    """
    replaced = F.dropout, F.scaled_dot_product_attention, F.softmax
    _, attention, softmax = replaced

    def normalise(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        """F.softmax, but from fp16 to fp32 without a copy of the input."""
        if dim is not None and input.dtype is torch.half and dtype is torch.float32:
            return torch._softmax(input, dim, True)
        return softmax(input, dim, _stacklevel, dtype)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """F.scaled_dot_product_attention without dropout; named as torch names them."""
        return attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)

    F.dropout, F.scaled_dot_product_attention, F.softmax = _dropout, attend, normalise
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention, F.softmax = replaced


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Named as torch names them: callers use the words."""
    if not training or p == 0:
        return input
    output, _ = torch.native_dropout(input, p, True)
    return output
