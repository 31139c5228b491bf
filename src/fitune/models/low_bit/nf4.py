"""Weights in 4-bit NormalFloat over bitsandbytes' functional ops (Dettmers et al. 2023, arXiv 2305.14314)."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fitune.models.low_bit.quantised import PackedWeight, QuantisedLinear
from fitune.values.plan import Nf4


class Nf4Weight(PackedWeight):
    """Two weights a byte, a scale per 64 of them; with double quantisation the scales are 8-bit themselves."""

    base: Nf4

    def pack(self, weight: Tensor) -> None:
        """Holds ``weight`` as NF4 codes with a scale for each block, the scales in 8 bits where quantised twice."""
        packed, scales = torch.ops.bitsandbytes.quantize_4bit.default(
            weight.contiguous(), Nf4.block, "nf4", torch.uint8
        )
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
        """One kernel for the whole weight, also for stacked matrices."""
        # Asked for as rows of one block: the library's CPU kernel shares rows among threads, and takes wrong scales
        # for rows that end inside a block.
        elements = self.shape.numel()
        row = Nf4.block if elements % Nf4.block == 0 else elements
        whole: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
            self.weight.view(torch.uint8).view(-1, 1),
            self._scales(),
            Nf4.block,
            "nf4",
            (elements // row, row),
            self.dtype,
        )
        return whole.view(self.shape)

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


@cache
def _scale_codes() -> tuple[float, ...]:
    """The 256 values that an 8-bit scale can have, of [-1, 1]; made from real numbers even while all else is fake."""
    from bitsandbytes.functional import create_dynamic_map

    with unset_fake_temporarily():
        return tuple(create_dynamic_map(signed=True).tolist())
