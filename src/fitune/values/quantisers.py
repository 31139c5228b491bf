"""Quantisers of a frozen base: what each is called, which settings it takes, and its bytes.

A quantiser is one class here and a row in QUANTISERS. Its linear, which needs torch, is the class in models/ that
``linear`` names. Packed are the linears of the blocks and the stacked matrices of experts; embedding, head, norms,
biases and routers stay in the compute type.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast

from fitune.values.model.model_spec import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """The frozen base stays in the compute type."""


class Quantiser(ABC):
    """Settings of one quantiser; ``str`` gives its name and settings in words."""

    __slots__ = ()

    widths: ClassVar[tuple[int, ...]]
    """Bits that a weight can have; the first is the default."""
    settings: ClassVar[frozenset[str]]
    """Settings of a recipe that it reads, beside ``quantization`` and ``quantization_bits``."""
    library: ClassVar[str]
    """Module whose functions it calls; the extra ``quant`` installs it."""
    linear: ClassVar[str]
    """``module:class`` of its linear."""
    stack: ClassVar[str | None] = None
    """``module:class`` of its stack of matrices, as experts have them; None: experts stay in the compute type."""

    @staticmethod
    def kinds() -> "tuple[type[Quantiser], ...]":
        """The classes that a plan's JSON can name (values/serial.py)."""
        return tuple(QUANTISERS.values())

    @classmethod
    @abstractmethod
    def asked_for(cls, *, bits: int | None, group_size: int, double: bool) -> Self:
        """The quantiser with a recipe's settings; ``bits`` are one of ``widths``."""

    def asked(self) -> dict[str, Any]:
        """Settings of a recipe that ask for this one, beside ``quantization``: the inverse of ``asked_for``."""
        return {}

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def packed_bytes(self, weights: int) -> int:
        """Bytes of a matrix's packed words: the parameter, of which sharding makes shares."""

    @abstractmethod
    def scale_bytes(self, weights: int, *, element_bytes: int) -> int:
        """Bytes that a matrix holds beside its words: its scales, and tables that they share."""

    def table_bytes(self, *, copies: int = 1) -> int:
        """Bytes of the tables among ``scale_bytes``: buffers, which every rank holds whole; the rest is divided.

        ``copies`` matrices in a stack may share some.
        """
        return 0

    def misfit(self, rows: int, columns: int, *, copies: int = 1) -> str | None:
        """Reason why a matrix of this shape cannot be packed; None where it can.

        ``copies`` is how many of them are stacked.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4(Quantiser):
    """4-bit NormalFloat, one scale per 64 weights (Dettmers et al. 2023, arXiv 2305.14314).

    With ``double_quant`` the scales are 8-bit numbers themselves, one fp32 scale per 256 of them.
    """

    widths: ClassVar = (4,)
    settings: ClassVar = frozenset({"double_quantization"})
    library: ClassVar = "bitsandbytes"
    linear: ClassVar = "fitune.models.low_bit.nf4:Nf4Linear"
    stack: ClassVar = "fitune.models.low_bit.nf4:Nf4Weight"

    block: ClassVar = 64
    """Weights per scale (bitsandbytes' default; section 3 of the paper)."""
    scale_block: ClassVar = 256
    """Scales per second-level scale with double quantisation (same section)."""
    double_quant: bool = True

    @classmethod
    def asked_for(cls, *, bits: int | None, group_size: int, double: bool) -> Self:
        """The quantiser with the settings of a recipe."""
        return cls(double_quant=double)

    def asked(self) -> dict[str, Any]:
        """The settings as keys of a recipe."""
        return {"double_quantization": self.double_quant}

    def __str__(self) -> str:
        return f"NF4{' with double quantisation' if self.double_quant else ''}"

    def packed_bytes(self, weights: int) -> int:
        """Bytes of so many packed weights."""
        return -(-weights // 2)

    def scale_bytes(self, weights: int, *, element_bytes: int) -> int:
        """4 per 64 weights; with double quantisation 1 per 64 + 4 per 64·256, 4.127 bit per weight, and a table."""
        scales = -(-weights // self.block)
        return (
            scales + 4 * -(-scales // self.scale_block) + self.table_bytes()
            if self.double_quant
            else 4 * scales
        )

    def table_bytes(self, *, copies: int = 1) -> int:
        """The 256 values that an 8-bit scale can have, and the mean of the scales of each matrix."""
        return (256 * 4 + 4 * copies) if self.double_quant else 0

    def misfit(self, rows: int, columns: int, *, copies: int = 1) -> str | None:
        """Reason why a stack cannot be packed: no scale may be of two matrices."""
        if copies == 1 or rows * columns % self.block == 0:
            return None
        return f"{rows} × {columns} weights in a stack, which leaves a rest in blocks of {self.block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hqq(Quantiser):
    """Half-quadratic quantisation: ``bits``, a scale and a zero per ``group_size`` weights (Badri & Shaji 2023)."""

    widths: ClassVar = (4, 8, 3, 2)
    settings: ClassVar = frozenset({"quantization_group_size"})
    library: ClassVar = "hqq.core.quantize"
    linear: ClassVar = "fitune.models.low_bit.hqq:HqqLinear"
    stack: ClassVar = "fitune.models.low_bit.hqq:HqqWeight"

    words: ClassVar = {8: (1, 1), 4: (2, 1), 3: (10, 4), 2: (4, 1)}
    """Bits -> weights per packed word, bytes of the word: ten 3-bit weights share an int32 (hqq.core.bitpack)."""

    bits: Literal[2, 3, 4, 8]
    group_size: int = 64

    @classmethod
    def asked_for(cls, *, bits: int | None, group_size: int, double: bool) -> Self:
        """The quantiser with the settings of a recipe."""
        return cls(bits=cast("Literal[2, 3, 4, 8]", bits or 4), group_size=group_size)

    def asked(self) -> dict[str, Any]:
        """The settings as keys of a recipe."""
        return {"quantization_bits": self.bits, "quantization_group_size": self.group_size}

    def __str__(self) -> str:
        return f"HQQ of {self.bits} bits in groups of {self.group_size}"

    def packed_bytes(self, weights: int) -> int:
        """Words of whole groups: each holds one weight of ``per_word`` groups."""
        per_word, word = self.words[self.bits]
        groups = -(-weights // self.group_size)
        return -(-groups // per_word) * self.group_size * word

    def unpacking_bytes(self, weights: int) -> int:
        """Two tensors as large as the words: their bits of one weight, masked and then shifted; none of whole bytes."""
        return 0 if self.words[self.bits][0] == 1 else 2 * self.packed_bytes(weights)

    def scale_bytes(self, weights: int, *, element_bytes: int) -> int:
        """A scale and a zero point per group in the compute type: 2·e/group for a weight."""
        return 2 * element_bytes * -(-weights // self.group_size)

    def misfit(self, rows: int, columns: int, *, copies: int = 1) -> str | None:
        """hqq packs whole groups, as many together as share a byte; 3-bit words are filled up."""
        together = 1 if self.bits == 3 else self.words[self.bits][0]
        if rows * columns % (self.group_size * together) == 0:
            return None
        return f"{rows} × {columns} weights, which leaves a rest in {together} × groups of {self.group_size}"


QUANTISERS: dict[str, type[Quantiser]] = {"nf4": Nf4, "hqq": Hqq}
"""The recipe's word -> quantiser. The first that has the bits asked for is taken where no word is given."""


def quantiser_for(word: str | None, *, bits: int | None, group_size: int, double: bool) -> Quantiser:
    """The quantiser that a recipe asks for, or the default one."""
    kinds = [QUANTISERS[word]] if word in QUANTISERS else list(QUANTISERS.values())
    kind = next(kind for kind in kinds if bits is None or bits in kind.widths)
    return kind.asked_for(bits=bits, group_size=group_size, double=double)


def settings_of(base: Dense | Quantiser) -> dict[str, Any]:
    """Settings of a recipe that ask for ``base``; empty for a dense one."""
    if isinstance(base, Dense):
        return {}
    word = next(word for word, kind in QUANTISERS.items() if kind is type(base))
    return {"quantization": word, **base.asked()}


def is_packed(linear: Linear, base: Dense | Quantiser) -> bool:
    """True if ``base`` holds the matrix, or the stack of them, in few bits."""
    if isinstance(base, Dense):
        return False
    return linear.adaptable or (linear.stacked and base.stack is not None)
