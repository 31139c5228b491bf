"""Weights packed as they are read: never more than one dense matrix of a quantised base exists.

transformers reads a checkpoint tensor by tensor and hands those that a quantiser asks for to it (HfQuantizer). This is
that quantiser; once all have arrived it puts the packed linears in place and leaves no trace of itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fitune.models.language_model import blocks_of
from fitune.models.quantised_linear import QuantisedLinear
from fitune.models.quantize import is_dense_linear, packed_linear
from fitune.spec.plan import Hqq, Nf4

_METHOD = "fitune"


@register_quantization_config(_METHOD)
class PackOnArrival(QuantizationConfigMixin):
    """What ``from_pretrained`` is given as its quantization_config."""

    def __init__(self, base: Nf4 | Hqq) -> None:
        self.quant_method = _METHOD
        self.base = base
        self.failure: Exception | None = None
        """What packing raised first: transformers keeps its words alone."""
        self.misshapen: dict[str, tuple[torch.Size, torch.Size]] = {}
        """Name -> shape found, shape wanted. Before 5.23 transformers does not look at what a quantiser was given."""


@register_quantizer(_METHOD)
class _Packer(HfQuantizer):
    """Collects packed linears by the name of their weight while the model's own stay empty."""

    def __init__(self, quantization_config: PackOnArrival, **_: Any) -> None:
        self.quantization_config = quantization_config
        self.pre_quantized = False
        self.linears: dict[str, nn.Module] = {}
        self.packed: dict[str, QuantisedLinear] = {}

    def preprocess_model(self, model: PreTrainedModel, **_: Any) -> None:
        inside = set(blocks_of(model).modules())
        self.linears = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if module in inside and is_dense_linear(module)
        }

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return param_name in self.linears

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """transformers takes the bytes of a whole model from a GPU in advance; of a packed weight it must take none."""
        return 0.0 if param_name in self.linears else float(param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def pack(self, name: str, weight: Tensor) -> Tensor:
        """What becomes of the dense linear's own weight: nothing. One of another shape is left to be refused."""
        linear = self.linears[name]
        if weight.shape != linear.weight.shape:
            self.quantization_config.misshapen[name] = (weight.shape, self.linears.pop(name).weight.shape)
            return weight
        self.packed[name] = packed_linear(linear, weight, self.quantization_config.base)
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> None:
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

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        try:
            return {
                name: self.packer.pack(name, value[0] if isinstance(value, list) else value)
                for name, value in input_dict.items()
            }
        except Exception as error:  # kept and raised again
            config = self.packer.quantization_config
            config.failure = config.failure or error
            raise
