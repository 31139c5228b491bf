"""Linears in 4-bit NormalFloat over bitsandbytes' functional ops (Dettmers et al. 2023, arXiv 2305.14314)."""

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fitune.models.quantised import QuantisedLinear
from fitune.spec.plan import Nf4


class Nf4Linear(QuantisedLinear):
    """Two weights a byte, a scale per 64 of them; with double quantisation the scales are 8-bit themselves."""

    base: Nf4

    def pack(self, weight_OI: Tensor) -> None:
        packed, scales = torch.ops.bitsandbytes.quantize_4bit.default(
            weight_OI.contiguous(), Nf4.block, "nf4", torch.uint8
        )
        if not self.base.double_quant:
            self.hold(packed, scales=scales)
            return
        mean = scales.mean().reshape(1)
        code = torch.tensor(_scale_codes(), dtype=torch.float32, device=scales.device)
        codes, nested_scales = torch.ops.bitsandbytes.quantize_blockwise.default(
            scales - mean, code, Nf4.scale_block
        )
        self.hold(packed, scales=codes, nested_scales=nested_scales)
        self.register_buffer("mean", mean)
        self.register_buffer("code", code, persistent=False)

    def dequantised(self) -> Tensor:
        shape = (self.out_features, self.in_features)
        whole: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            self.weight.view(torch.uint8).view(-1, 1), self._scales(), Nf4.block, "nf4", shape, self.dtype
        )
        return whole

    def _scales(self) -> Tensor:
        if not self.base.double_quant:
            return self.scales
        scales: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
            self.scales, self.nested_scales, self.code, Nf4.scale_block, torch.float32
        )
        return scales.add_(self.mean)


@cache
def _scale_codes() -> tuple[float, ...]:
    """The 256 values that an 8-bit scale can have, of [-1, 1]; made from real numbers even while all else is fake."""
    from bitsandbytes.functional import create_dynamic_map

    with unset_fake_temporarily():
        return tuple(create_dynamic_map(signed=True).tolist())
