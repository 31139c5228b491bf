"""What a step on fake tensors must be told, because it depends on data or on the device it stands for.

Shapes: B rows, n heads, k key heads, T tokens, d head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fitune.errors import ModelError
from fitune.spec.hardware import Gpu

_aten = torch.ops.aten

_LARGE_NORM = 1e9
"""Every number that a step reads is the gradients' norm: large, so that clipping is rehearsed too."""

# The fake CPU's fused kernel stands for CUDA's: the same inputs, output and log-sum-exp are kept.
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH_STREAM_BACKWARD = _aten._flash_attention_backward.default


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
        """What a CUDA attention kernel allocates inside its backward, where no trace can look.

        FlashAttention-2: the fp32 gradient of the queries, padded to 128 tokens (for a stream by 128 tokens a row),
        and a sum per query; with grouped heads also the gradients of keys and values for every query
        head, before they are added up (flash_api.cpp, mha_bwd and mha_varlen_bwd: dq_accum, softmax_d, dk_expanded,
        dv_expanded). The memory-efficient kernel accumulates alike. Read in the sources, not measured by us.
        """
        if func is _FLASH_STREAM_BACKWARD:
            query_Tnd, key_Tkd, bounds = args[1], args[2], args[6]
            tokens, heads, _ = query_Tnd.shape
            padded = tokens + 128 * (len(bounds) - 1)
            return _flash_workspace(query_Tnd, padded=padded, grouped=key_Tkd.shape[1] != heads, heads=heads)
        if self.gpu.is_cpu or func is not _FLASH_BACKWARD:
            return 0
        query_BnTd, key_BkTd = args[1], args[2]
        B, n, T, _ = query_BnTd.shape
        padded = B * -(-T // 128) * 128
        return _flash_workspace(query_BnTd, padded=padded, grouped=key_BkTd.shape[1] != n, heads=n)

    def _supervised_positions(self, mask: Tensor) -> Tensor:
        """The models' only data-dependent shape: the positions that have a label."""
        if mask.dim() != 1:
            raise ModelError(
                f"the model looks for what is not zero in a tensor of {mask.dim()} dimensions: how much that is "
                "depends on the data, so its step cannot be rehearsed",
                hint="`fitune plan` estimates it",
            )
        return torch.empty((self.supervised_tokens, 1), dtype=torch.int64)


def _flash_workspace(query: Tensor, *, padded: int, grouped: bool, heads: int) -> int:
    """4 · n · padded · (d + 1), and 2 · e · T · n · d for grouped heads."""
    accumulated = 4 * heads * padded * (query.shape[-1] + 1)
    return accumulated + (2 * query.numel() * query.element_size() if grouped else 0)


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
