"""Weights in 4-bit NormalFloat over bitsandbytes' functional ops (Dettmers et al. 2023, arXiv 2305.14314)."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fitune.models.low_bit.quantised import PackedWeight, QuantisedLinear
from fitune.values.plan import Nf4

MOST_COUNTED = 2**31 - 1
"""Weights that one call of the library's GPU kernels takes: they count in 32 bits, and more wrap around without a word.
The stacks of the largest mixtures (256 experts of 4096 × 7168) have more."""


class Nf4Weight(PackedWeight):
    """Two weights a byte, a scale per 64 of them; with double quantisation the scales are 8-bit themselves."""

    base: Nf4

    def pack(self, weight: Tensor) -> None:
        """Holds ``weight`` as NF4 codes with a scale for each block, the scales in 8 bits where quantised twice."""
        packed, scales = _packed(weight)
        if not self.base.double_quant:
            self.hold(packed, scales=scales)
            return
        scales_ES = scales.view(self.copies, -1)
        mean_E = torch.stack([scales_S.mean() for scales_S in scales_ES])  # rounds as one matrix alone would
        code = torch.tensor(_scale_codes(), dtype=torch.float32, device=scales.device)
        codes, nested_scales = torch.ops.bitsandbytes.quantize_blockwise.default(
            self._in_whole_blocks(scales_ES - mean_E.unsqueeze(-1)), code, Nf4.scale_block
        )
        self.hold(packed, scales=self._without_filling(codes), nested_scales=nested_scales)
        self.register_buffer("mean", mean_E)
        self.register_buffer("code", code, persistent=False)

    def dequantised(self) -> Tensor:
        """One kernel for the whole weight, also for stacked matrices, as far as it can count them."""
        packed, scales = self.weight.view(torch.uint8).view(-1, 1), self._scales()
        if self.shape.numel() <= MOST_COUNTED:
            return _unpacked(packed, scales, self.shape, self.dtype)
        whole = self.weight.new_empty(self.shape, dtype=self.dtype)
        matrices = zip(
            whole.flatten(0, -3), packed.chunk(self.copies), scales.chunk(self.copies), strict=True
        )
        for matrix_OI, own_packed, own_scales in matrices:
            matrix_OI.copy_(_unpacked(own_packed, own_scales, matrix_OI.shape, self.dtype))
        return whole

    def _scales(self) -> Tensor:
        if not self.base.double_quant:
            return self.scales
        scales: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
            self._in_whole_blocks(self.scales.view(torch.uint8).view(self.copies, -1)), self.nested_scales, self.code,
            Nf4.scale_block, torch.float32,
        )  # fmt: skip
        scales = self._without_filling(scales)
        return scales.view(self.copies, -1).add_(self.mean.unsqueeze(-1)).view(-1)

    def _in_whole_blocks(self, scales_ES: Tensor) -> Tensor:
        """The scales of all matrices in a row, those of each filled up to whole blocks: no block is of two."""
        rest = -scales_ES.shape[1] % Nf4.scale_block if self.copies > 1 else 0
        return (F.pad(scales_ES, (0, rest)) if rest else scales_ES).reshape(-1)

    def _without_filling(self, scales: Tensor) -> Tensor:
        each = self.shape.numel() // self.copies // Nf4.block
        return scales if self.copies == 1 else scales.view(self.copies, -1)[:, :each].reshape(-1)


class Nf4Linear(Nf4Weight, QuantisedLinear):
    """A linear of such a weight."""


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and the scale of each block; of more weights than the kernel counts, matrix by matrix."""
    if weight.numel() > MOST_COUNTED:
        each = [_packed(matrix_OI) for matrix_OI in weight.flatten(0, -3)]
        packed, scales = (torch.cat(parts) for parts in zip(*each, strict=True))
        return packed, scales
    found: tuple[Tensor, Tensor] = torch.ops.bitsandbytes.quantize_4bit.default(
        weight.contiguous(), Nf4.block, "nf4", torch.uint8
    )
    return found


def _unpacked(packed: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    # Asked for as rows of one block: the library's CPU kernel shares rows among threads, and takes wrong scales
    # for rows that end inside a block.
    elements = shape.numel()
    row = Nf4.block if elements % Nf4.block == 0 else elements
    whole: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed, scales, Nf4.block, "nf4", (elements // row, row), dtype
    )
    return whole.view(shape)


@cache
def _scale_codes() -> tuple[float, ...]:
    """The 256 values that an 8-bit scale can have, of [-1, 1]; made from real numbers even while all else is fake."""
    from bitsandbytes.functional import create_dynamic_map

    with unset_fake_temporarily():
        return tuple(create_dynamic_map(signed=True).tolist())
