"""Frozen weights in few bits: a linear's, and a stack of matrices such as the experts of a mixture.

Ordinary modules that hold ordinary tensors, so that the same module is wrapped by PEFT, traced on fake tensors,
sharded, offloaded and saved. The libraries' own modules hold tensor subclasses or dictionaries and fail there.
"""

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fitune.errors import ModelError, require_library
from fitune.values.plan import Dense, Quantiser


class PackedWeight(nn.Module, ABC):
    """Matrices [out, in], or a stack of them [experts, out, in], in few bits: ``weight`` and, beside it, its scales.

    A quantiser's own class has two methods, ``pack`` and ``dequantised``, and is named by its row in
    values/quantisers.py. Each matrix of a stack is packed as if it were alone. What is a parameter is divided over
    ranks; a small table that all scales share is a buffer.
    """

    def __init__(self, shape: Sequence[int], *, base: Quantiser, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a dense weight
        self.shape = torch.Size(shape)
        self.base: Quantiser = base
        self.dtype = dtype
        """The compute type: what comes in, what goes out, and what the weight is made whole in."""
        self.packed_names: tuple[str, ...] = ()
        """The parameters that are packed bytes, which mean nothing as numbers of their type."""

    @property
    def copies(self) -> int:
        """Matrices in the stack."""
        return math.prod(self.shape[:-2])

    @abstractmethod
    def pack(self, weight: Tensor) -> None:
        """Hold ``weight`` in few bits."""

    @abstractmethod
    def dequantised(self) -> Tensor:
        """The weight in its shape and the compute type, new."""

    def hold(self, packed: Tensor, **beside: Tensor) -> None:
        """Keep the packed weight and its scales as parameters; whole numbers as the bytes of the compute type.

        PEFT makes adapters in the type of ``weight``. FSDP2 divides the rows of each; where the types of frozen
        parameters differ it gathers bytes. That of torch 2.11 asks whole numbers for a gradient, and fails.
        """
        self.packed_names = ()
        for name, tensor in {"weight": packed, **beside}.items():
            if not tensor.is_floating_point():
                self.packed_names += (name,)
                # bytes in a row, seen as the compute type where they come out even
                tensor = tensor.contiguous().view(torch.uint8).view(-1)
                tensor = tensor if len(tensor) % self.dtype.itemsize else tensor.view(self.dtype)
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Packed bytes and scales move between devices, and no ``to(dtype)`` casts them."""

        def moved(tensor: Tensor) -> Tensor:
            """``tensor`` where ``fn`` brings its bytes, in its own type."""
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)

        for name, parameter in self.named_parameters(recurse=False):
            parameter.data = fn(parameter.data) if name == "bias" else moved(parameter.data)
        for name, buffer in self.named_buffers(recurse=False):
            self._buffers[name] = moved(buffer)
        return self


class QuantisedLinear(PackedWeight, nn.Linear):
    """A frozen linear whose weight is packed; one product at a time makes it dense.

    A quantiser's linear is its ``PackedWeight`` as well, or has ``pack`` and ``dequantised`` of its own.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: Tensor | None, base: Quantiser, dtype: torch.dtype
    ) -> None:
        super().__init__((out_features, in_features), base=base, dtype=dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, in the order of rounding that the library has."""
        return F.linear(x, self.dequantised(), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of ``x`` [..., in]."""
        return _FrozenProduct.apply(x, self)

    @property
    def W_q(self) -> Tensor:
        """PEFT asks a layer that has this to make its weight whole itself (``dequantize_module_weight``, for DoRA)."""
        return self.weight

    def dequantize(self) -> Tensor:
        """The dense weight [out, in], by the name that PEFT calls it."""
        return self.dequantised()


class _FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b for a weight that is made whole again in backward: nothing is saved, one weight is whole at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantisedLinear) -> Tensor:
        """[..., out] of ``x`` [..., in]."""
        ctx.linear = linear
        return linear.product(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Gradient [..., in] for ``x``; the weight is frozen."""
        return gradient @ ctx.linear.dequantised(), None


def _class_at(place: str) -> type[Any]:
    """The class that values/quantisers.py names by ``module:class``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def require_quantiser(base: Dense | Quantiser) -> None:
    """Raises MissingExtra before anything is read: inside a conversion transformers would take it for damaged files."""
    if not isinstance(base, Dense):
        require_library(base.library, needed_by=f"a base in {base}", extra="quant")


def is_dense_linear(module: nn.Module) -> bool:
    """True for a linear whose weight is whole. Llama 4's router is none: it is built as one, and returns scores."""
    is_linear = isinstance(module, nn.Linear | Conv1D) and not isinstance(module, QuantisedLinear)
    return is_linear and not type(module).__name__.endswith("Router")


def is_state_space(module: nn.Module) -> bool:
    """True for the mixers of Mamba and Mamba 2; a delta rule has no D."""
    return module._parameters.keys() >= {"A_log", "D"}


def is_read_by_kernels(parent: nn.Module, name: str) -> bool:
    """True for a linear of ``parent`` whose weight is read, or clipped, without calling it.

    Fused kernels of state-space mixers and AltUp (Gemma 3n) do so. It is neither packed nor adapted: PEFT 0.21 refuses
    ``out_proj`` of most state-space models for that reason.
    """
    if name in ("prediction_coefs", "correction_coefs"):
        return hasattr(parent, "correct_output_scale")
    return name in ("dt_proj", "out_proj", "x_proj") and is_state_space(parent)


def packed_linear(linear: nn.Module, weight: Tensor, base: Quantiser) -> QuantisedLinear:
    """A linear like ``linear`` that holds ``weight`` in few bits.

    GPT-2's Conv1D keeps its weight transposed, [in, out]; packed it is a linear like all others.
    """
    weight_OI = weight.T if isinstance(linear, Conv1D) else weight
    out_features, in_features = weight_OI.shape
    _require_fit(weight_OI.shape, base)
    packed: QuantisedLinear = _class_at(base.linear)(
        in_features, out_features, bias=linear.bias, base=base, dtype=weight_OI.dtype
    )
    packed.pack(weight_OI)
    return packed


def packed_stack(weight_EOI: Tensor, base: Quantiser) -> PackedWeight:
    """A stack of matrices in few bits, each as if it were alone."""
    _require_fit(weight_EOI.shape, base)
    assert base.stack is not None  # whoever asks has looked
    packed: PackedWeight = _class_at(base.stack)(weight_EOI.shape, base=base, dtype=weight_EOI.dtype)
    packed.pack(weight_EOI)
    return packed


def _require_fit(shape: torch.Size, base: Quantiser) -> None:
    require_quantiser(base)
    *copies, rows, columns = shape
    if misfit := base.misfit(rows, columns, copies=math.prod(copies)):
        raise ModelError(
            f"{base} cannot hold a matrix of {misfit}",
            hint="quantization_group_size: 64, or quantization: nf4",
        )


def quantised_base(model: nn.Module) -> Dense | Quantiser:
    """The quantiser of the linears of ``model``; Dense() where none is packed."""
    found = next((m.base for m in model.modules() if isinstance(m, PackedWeight)), None)
    return Dense() if found is None else found


def count_weights(model: nn.Module) -> int:
    """Parameters of ``model``, a packed matrix by the weights it stands for."""
    packed = [m for m in model.modules() if isinstance(m, PackedWeight)]
    in_their_place = {
        id(p) for m in packed for name, p in m.named_parameters(recurse=False) if name != "bias"
    }
    others = sum(elements(p) for p in model.parameters() if id(p) not in in_their_place)
    return others + sum(m.shape.numel() for m in packed)


def elements(parameter: nn.Parameter) -> int:
    """Elements of a parameter, also of one of which DeepSpeed left this rank a share."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
