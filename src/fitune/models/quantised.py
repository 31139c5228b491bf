"""Frozen linears in few bits: the module that holds one, the place it takes in a model, and packing while loading.

An ordinary nn.Linear that holds ordinary tensors, so that the same module is wrapped by PEFT, traced on fake tensors,
sharded, offloaded and saved. The libraries' own modules hold tensor subclasses or dictionaries and fail there.

Only the linears of the blocks are packed. Embedding, head, norms and biases stay in the compute type; so do routers and
experts, which transformers holds as bare parameters.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fitune.errors import ModelError, require_library
from fitune.models.language_model import blocks_of
from fitune.spec.plan import Dense, Quantiser


class QuantisedLinear(nn.Linear, ABC):
    """``weight`` is packed and its scales lie beside it, all frozen parameters; one product at a time makes them dense.

    A quantiser's linear is a subclass with two methods, ``pack`` and ``dequantised``, named by its row in
    spec/quantisers.py. What is a parameter is divided over ranks; a small table that all scales share is a buffer.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: Tensor | None, base: Quantiser, dtype: torch.dtype
    ) -> None:
        super(nn.Linear, self).__init__()  # nn.Linear's own would make a dense weight
        self.in_features = in_features
        self.out_features = out_features
        self.base: Quantiser = base
        self.dtype = dtype
        """The compute type: what comes in, what goes out, and what the weight is made whole in."""
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

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
        """Keep the packed weight, in the compute type where its bytes come out even, and its scales as they are.

        PEFT makes adapters in the type of ``weight``. FSDP2 divides the rows of each; where the types of frozen
        parameters differ it gathers bytes.
        """
        as_bytes = packed.contiguous().view(torch.uint8)
        divides = as_bytes.shape[-1] * as_bytes.shape[0] % self.dtype.itemsize == 0
        stored = as_bytes.view(-1).view(self.dtype if divides else torch.uint8)
        self.weight = nn.Parameter(stored, requires_grad=False)
        for name, tensor in beside.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedLinear":
        """Packed bytes and scales move between devices, and no ``to(dtype)`` casts them."""

        def moved(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.uint8)).view(tensor.dtype)

        for name, parameter in self.named_parameters(recurse=False):
            parameter.data = fn(parameter.data) if name == "bias" else moved(parameter.data)
        for name, buffer in self.named_buffers(recurse=False):
            self._buffers[name] = moved(buffer)
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


def _linear_class(base: Quantiser) -> type[QuantisedLinear]:
    module, _, name = base.linear.partition(":")
    found: type[QuantisedLinear] = getattr(importlib.import_module(module), name)
    return found


def require_quantiser(base: Dense | Quantiser) -> None:
    """Raises MissingExtra before anything is read: inside a conversion transformers would take it for damaged files."""
    if not isinstance(base, Dense):
        require_library(base.library, needed_by=f"a base in {base}", extra="quant")


def quantise_linears(blocks: nn.Module, base: Dense | Quantiser) -> None:
    """Replace every dense linear inside ``blocks``; each dense weight is let go of before the next is packed."""
    if isinstance(base, Dense):
        return
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if is_dense_linear(child):
                setattr(parent, name, packed_linear(child, child.weight.detach(), base))


def is_dense_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D) and not isinstance(module, QuantisedLinear)


def packed_linear(linear: nn.Module, weight: Tensor, base: Quantiser) -> QuantisedLinear:
    """A linear like ``linear`` that holds ``weight`` in few bits.

    GPT-2's Conv1D keeps its weight transposed, [in, out]; packed it is a linear like all others.
    """
    weight_OI = weight.T if isinstance(linear, Conv1D) else weight
    out_features, in_features = weight_OI.shape
    require_quantiser(base)
    if misfit := base.misfit(out_features, in_features):
        raise ModelError(
            f"{base} cannot hold a matrix of {misfit}",
            hint="quantization_group_size: 64, or quantization: nf4",
        )
    packed = _linear_class(base)(
        in_features, out_features, bias=linear.bias, base=base, dtype=weight_OI.dtype
    )
    packed.pack(weight_OI)
    packed.train(linear.training)
    return packed


def quantised_base(model: nn.Module) -> Dense | Quantiser:
    """The quantiser of the linears of ``model``; Dense() where none is packed."""
    found = next((m.base for m in model.modules() if isinstance(m, QuantisedLinear)), None)
    return Dense() if found is None else found


def count_weights(model: nn.Module) -> int:
    """Parameters of ``model``, a packed matrix by the weights it stands for."""
    packed = [m for m in model.modules() if isinstance(m, QuantisedLinear)]
    in_their_place = {id(p) for m in packed for p in m.parameters(recurse=False) if p is not m.bias}
    others = sum(p.numel() for p in model.parameters() if id(p) not in in_their_place)
    return others + sum(m.in_features * m.out_features for m in packed)


Keep = Callable[[Tensor], Tensor]
"""Takes a whole weight as soon as it is there; returns what the model has in its place."""

_METHOD = "fitune"


@register_quantization_config(_METHOD)
class PackOnArrival(QuantizationConfigMixin):
    """The quantization_config that ``from_pretrained`` is given."""

    def __init__(self, base: Dense | Quantiser, *, keep: Keep | None = None) -> None:
        self.quant_method: Any = _METHOD  # transformers looks it up by this word
        self.base = base
        self.keep = keep
        self.failure: Exception | None = None
        """First error of packing: transformers keeps only its text."""
        self.misshapen: dict[str, tuple[torch.Size, torch.Size]] = {}
        """Name -> shape found, shape wanted. Before 5.23 transformers does not look at what a quantiser was given."""


@register_quantizer(_METHOD)
class _Packer(HfQuantizer):
    """Collects packed linears by the name of their weight while the model's own stay empty; hands all to ``keep``."""

    def __init__(self, quantization_config: PackOnArrival, **_: Any) -> None:
        self.quantization_config: Any = quantization_config
        self.pre_quantized = False
        self.linears: dict[str, nn.Module] = {}
        self.packed: dict[str, QuantisedLinear] = {}
        self.kept: dict[str, torch.Size] = {}
        """Name -> shape of the others that ``keep`` is given."""

    def preprocess_model(self, model: PreTrainedModel, *_: Any, **__: Any) -> None:
        inside = set(blocks_of(model).modules())
        if not isinstance(self.quantization_config.base, Dense):
            self.linears = {
                f"{name}.weight": module
                for name, module in model.named_modules()
                if module in inside and is_dense_linear(module)
            }
        if self.quantization_config.keep is not None:
            tables = (model.get_input_embeddings(), model.get_output_embeddings())
            tied = {id(p) for m in tables for p in m.parameters() if model.config.tie_word_embeddings}
            self.kept = {
                name: p.shape
                for name, p in model.named_parameters()
                if name not in self.linears and id(p) not in tied and p.dtype == model.dtype
            }

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return param_name in self.linears or param_name in self.kept

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """transformers takes the bytes of a whole model from a GPU in advance; of a packed weight it must take none."""
        return 0.0 if self.param_needs_quantization(model, param_name) else float(param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def pack(self, name: str, weight: Tensor) -> Tensor:
        """Pack ``weight``; returns an empty tensor for the dense linear, or ``weight`` where its shape is wrong."""
        config = self.quantization_config
        expected = self.linears[name].weight.shape if name in self.linears else self.kept[name]
        if weight.shape != expected:
            config.misshapen[name] = (weight.shape, expected)
            self.linears.pop(name, None)
            self.kept.pop(name, None)
            return weight
        if name in self.kept:
            return config.keep(weight)
        packed = self.packed[name] = packed_linear(self.linears[name], weight, config.base)
        packed.bias = None  # it comes by itself
        for inner, held in list(packed.named_parameters()):
            if config.keep is not None:
                packed.register_parameter(inner, nn.Parameter(config.keep(held), requires_grad=False))
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def postprocess_model(self, model: PreTrainedModel, **__: Any) -> None:
        for weight_name, packed in self.packed.items():
            parent, _, name = weight_name.removesuffix(".weight").rpartition(".")
            packed.bias = self.linears[weight_name].bias
            setattr(model.get_submodule(parent), name, packed.train(model.training))
        del model.hf_quantizer, model.config.quantization_config

    def is_serializable(self, *_: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Pack(ConversionOps):
    """One weight's way into its packed linear."""

    def __init__(self, packer: _Packer) -> None:
        self.packer = packer

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Tensor]:
        try:
            return {
                name: self.packer.pack(name, value[0] if isinstance(value, list) else value)
                for name, value in input_dict.items()
            }
        except Exception as error:  # kept and raised again
            config = self.packer.quantization_config
            config.failure = config.failure or error
            raise
