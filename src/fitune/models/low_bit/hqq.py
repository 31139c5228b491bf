"""Weights quantised by half-quadratic splitting over hqq's own functions (Badri & Shaji 2023).

https://mobiusml.github.io/hqq_blog
A weight is (code − zero) · scale, with a scale and a zero point per group of neighbours in a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fitune.models.low_bit.quantised import PackedWeight, QuantisedLinear
from fitune.values.plan import Hqq

_PACKING = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}
_WORDS = {1: torch.uint8, 4: torch.int32}
"""Bytes of a word -> its type."""


class HqqWeight(PackedWeight):
    """Codes of 2, 3, 4 or 8 bit. No dequantised copy is kept, and no input (hqq's own modules keep one or both)."""

    base: Hqq

    def pack(self, weight: Tensor) -> None:
        """Stacked matrices [E, O, I] are quantised one by one."""
        each = [
            quantise(matrix_OI, self.base.bits, self.base.group_size)
            for matrix_OI in weight.reshape(-1, *self.shape[-2:])
        ]
        words, scale, zero = (torch.cat(parts) for parts in zip(*each, strict=True))
        self.hold(words, scale=scale, zero=zero)

    def dequantised(self) -> Tensor:
        """Stacked matrices are made one at a time: no more than one is held beside the result."""
        _, word_bytes = Hqq.words[self.base.bits]
        words = self.weight.view(torch.uint8).view(_WORDS[word_bytes])
        words_EWG = words.view(self.copies, -1, self.base.group_size)
        scale_EG1, zero_EG1 = (tensor.view(self.copies, -1, 1) for tensor in (self.scale, self.zero))
        if self.copies == 1:
            return self._matrix(words_EWG[0], scale_EG1[0], zero_EG1[0]).view(self.shape)
        whole = self.weight.new_empty(self.shape, dtype=self.dtype)
        for matrix_OI, *parts in zip(whole, words_EWG, scale_EG1, zero_EG1, strict=True):
            matrix_OI.copy_(self._matrix(*parts).view(matrix_OI.shape))
        return whole

    def _matrix(self, words_WG: Tensor, scale_G1: Tensor, zero_G1: Tensor) -> Tensor:
        from hqq.core.quantize import Quantizer

        codes = Quantizer.unpack[_PACKING[self.base.bits]](words_WG, dtype=self.dtype)
        codes = codes[: len(scale_G1)]  # 3-bit words are filled up with zeros
        return codes.sub_(zero_G1).mul_(scale_G1)


class HqqLinear(HqqWeight, QuantisedLinear):
    """A linear of such a weight."""

    def product(self, x: Tensor) -> Tensor:
        """The bias is added after the product has been rounded, as hqq does it."""
        output = F.linear(x, self.dequantised())
        return output if self.bias is None else output.add_(self.bias)


@torch.library.custom_op("fitune::hqq_quantise", mutates_args=())
def quantise(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed words [rows of words, group], scale and zero [groups, 1] in the type of ``weight``, by hqq's defaults.

    An operation of its own, because hqq stops iterating when the error does: no fake tensor can say when.
    """
    from hqq.core.quantize import Quantizer

    words, meta = Quantizer.quantize(
        weight, nbits=bits, group_size=group_size, axis=1, round_zero=bits == 4, device=str(weight.device)
    )
    return words, meta["scale"].to(weight.dtype, copy=True), meta["zero"].to(weight.dtype, copy=True)


@quantise.register_fake
def _fake_quantise(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    per_word, word_bytes = Hqq.words[bits]
    groups = weight.numel() // group_size
    words = weight.new_empty((-(-groups // per_word), group_size), dtype=_WORDS[word_bytes])
    return words, weight.new_empty((groups, 1)), weight.new_empty((groups, 1))
