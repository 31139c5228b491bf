"""Linears quantised by half-quadratic splitting over hqq's own functions (Badri & Shaji 2023).

https://mobiusml.github.io/hqq_blog
A weight is (code − zero) · scale, with a scale and a zero point per group of neighbours in a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fitune.models.quantised import QuantisedLinear
from fitune.spec.plan import Hqq

_PACKING = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}
_WORDS = {1: torch.uint8, 4: torch.int32}
"""Bytes of a word -> its type."""


class HqqLinear(QuantisedLinear):
    """Codes of 2, 3, 4 or 8 bit. No dequantised copy is kept, and no input (hqq's own modules keep one or both)."""

    base: Hqq

    def pack(self, weight_OI: Tensor) -> None:
        words, scale, zero = quantise(weight_OI, self.base.bits, self.base.group_size)
        self.hold(words, scale=scale, zero=zero)

    def dequantised(self) -> Tensor:
        from hqq.core.quantize import Quantizer

        _, word_bytes = Hqq.words[self.base.bits]
        words = self.weight.view(torch.uint8).view(_WORDS[word_bytes]).view(-1, self.base.group_size)
        codes = Quantizer.unpack[_PACKING[self.base.bits]](words, dtype=self.dtype)
        codes = codes[: len(self.scale)]  # 3-bit words are filled up with zeros
        return codes.sub_(self.zero).mul_(self.scale).view(self.out_features, self.in_features)

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
def _(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    per_word, word_bytes = Hqq.words[bits]
    groups = weight.numel() // group_size
    words = weight.new_empty((-(-groups // per_word), group_size), dtype=_WORDS[word_bytes])
    return words, weight.new_empty((groups, 1)), weight.new_empty((groups, 1))
