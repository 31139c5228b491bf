"""A frozen linear in few bits: what every quantiser's linear has in common.

An ordinary nn.Linear that holds ordinary tensors, so that the same module is wrapped by PEFT, traced on fake tensors,
sharded, offloaded and saved. The libraries' own modules hold tensor subclasses or
dictionaries and fail at one of these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitune.errors import require_library
from fitune.spec.plan import Hqq, Nf4


class QuantisedLinear(nn.Linear, ABC):
    """``weight`` is packed, its scales lie beside it as buffers; both are made whole for one product at a time.

    A quantiser is a subclass with two methods, ``pack`` and ``dequantised``, and a row in models/quantize.py.
    """

    library: ClassVar[str]
    """The module whose functions it calls."""
    quantiser: ClassVar[str]
    """Its name in words."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: Tensor | None, base: Nf4 | Hqq, dtype: torch.dtype
    ) -> None:
        super(nn.Linear, self).__init__()  # nn.Linear's own would make a dense weight
        self.in_features = in_features
        self.out_features = out_features
        self.base: Nf4 | Hqq = base
        self.dtype = dtype
        """The compute type: what comes in, what goes out, and what the weight is made whole in."""
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def require(cls) -> None:
        """Raises MissingExtra when the library is not installed."""
        require_library(cls.library, needed_by=f"a base in {cls.quantiser}", extra="quant")

    @abstractmethod
    def pack(self, weight_OI: Tensor) -> None:
        """Hold ``weight_OI`` [out, in] in few bits."""

    @abstractmethod
    def dequantised(self) -> Tensor:
        """The weight [out, in] in the compute type, new."""

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, in the order of rounding that the library has."""
        return F.linear(x, self.dequantised(), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _FrozenProduct.apply(x, self)
        return output

    def hold(self, packed: Tensor, **beside: Tensor) -> None:
        """Keep the packed weight, in the compute type where its bytes come out even.

        FSDP2 shards floating parameters of one type, and PEFT makes adapters in the type of ``weight``.
        """
        as_bytes = packed.contiguous().view(torch.uint8)
        divides = as_bytes.shape[-1] * as_bytes.shape[0] % self.dtype.itemsize == 0
        stored = as_bytes.view(-1).view(self.dtype if divides else torch.uint8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        for name, tensor in beside.items():
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedLinear":
        """Packed bytes and scales move between devices, and no ``to(dtype)`` casts them."""

        def moved(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)

        self.weight.data = moved(self.weight.data)
        for name, buffer in self.named_buffers(recurse=False):
            self._buffers[name] = moved(buffer)
        if self.bias is not None:
            self.bias.data = fn(self.bias.data)
        return self

    @property
    def W_q(self) -> Tensor:
        """PEFT asks a layer that has this to make its weight whole itself (``dequantize_module_weight``, for DoRA)."""
        return self.weight

    def dequantize(self) -> Tensor:
        return self.dequantised()


class _FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b for a weight that is made whole again in backward: nothing is saved, one weight is whole at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantisedLinear) -> Tensor:
        ctx.linear = linear
        return linear.product(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.linear.dequantised(), None
