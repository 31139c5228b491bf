"""Which weights of a block are packed, and what takes their place: linears, and the stacked matrices of experts.

Embedding, head, norms, biases and routers stay in the compute type.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fitune.models.experts import STACKS, hold_packed, is_experts
from fitune.models.language_model import blocks_of
from fitune.models.low_bit.quantised import (
    PackedWeight,
    QuantisedLinear,
    is_dense_linear,
    is_read_by_kernels,
    packed_linear,
    packed_stack,
)
from fitune.values.plan import Dense, Quantiser


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A dense weight in a model, and the packed one that takes its place."""

    parent: nn.Module
    name: str
    """The name of the linear, or of the stack of experts, in ``parent``."""

    @property
    def dense(self) -> Tensor:
        """The weight as it is now."""
        held = getattr(self.parent, self.name)
        return held.weight if isinstance(held, nn.Module) else held

    def packed(self, weight: Tensor, base: Quantiser) -> PackedWeight:
        """``weight`` in few bits."""
        held = getattr(self.parent, self.name)
        return (
            packed_linear(held, weight, base) if isinstance(held, nn.Module) else packed_stack(weight, base)
        )

    def take(self, packed: PackedWeight) -> None:
        """Put ``packed`` there."""
        held = getattr(self.parent, self.name)
        if isinstance(held, nn.Module):
            packed.bias = held.bias
            setattr(self.parent, self.name, packed.train(held.training))
        else:
            hold_packed(self.parent, self.name, packed)


def places_in(block: nn.Module, base: Dense | Quantiser) -> Iterator[tuple[str, WeightPlace]]:
    """Name in ``block`` and place of each weight that ``base`` packs."""
    if isinstance(base, Dense):
        return
    for name, module in block.named_modules():
        before = f"{name}." if name else ""
        for child_name, child in module.named_children():
            if is_dense_linear(child) and not is_read_by_kernels(module, child_name):
                yield f"{before}{child_name}.weight", WeightPlace(module, child_name)
        if base.stack is not None and is_experts(module):
            for stack in STACKS:
                if module._parameters.get(stack) is not None:
                    yield f"{before}{stack}", WeightPlace(module, stack)


def quantise_blocks(blocks: nn.Module, base: Dense | Quantiser) -> None:
    """Replace every weight that ``base`` packs; each dense one is let go of before the next is packed."""
    if isinstance(base, Dense):
        return
    for _, place in list(places_in(blocks, base)):
        place.take(place.packed(place.dense.detach(), base))


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
class _Packer(HfQuantizer, ConversionOps):
    """Collects packed linears by the name of their weight while the model's own stay empty; hands all to ``keep``.

    It is the operation that transformers runs on each of them as well.
    """

    def __init__(self, quantization_config: PackOnArrival, **_: Any) -> None:
        self.quantization_config: Any = quantization_config
        self.pre_quantized = False
        self.places: dict[str, WeightPlace] = {}
        """Name of a dense weight -> where it is."""
        self.packed: dict[str, PackedWeight] = {}
        self.kept: dict[str, torch.Size] = {}
        """Name -> shape of the others that ``keep`` is given."""

    def preprocess_model(self, model: PreTrainedModel, *_: Any, **__: Any) -> None:
        """Finds the linears to pack, and what ``keep`` takes, before any weight is read."""
        config = self.quantization_config
        names = {id(block): name for name, block in model.named_modules()}
        for block in blocks_of(model):
            self.places |= {
                f"{names[id(block)]}.{name}": place for name, place in places_in(block, config.base)
            }
        if config.keep is not None:
            tables = (model.get_input_embeddings(), model.get_output_embeddings())
            tied = {id(p) for m in tables for p in m.parameters() if model.config.tie_word_embeddings}
            self.kept = {
                name: p.shape
                for name, p in model.named_parameters()
                if name not in self.places and id(p) not in tied and p.dtype == model.dtype
            }

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """True for weights that are packed or handed to ``keep``."""
        return param_name in self.places or param_name in self.kept

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """transformers takes the bytes of a whole model from a GPU in advance; of a packed weight it must take none."""
        return 0.0 if self.param_needs_quantization(model, param_name) else float(param.element_size())

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that transformers runs on each weight that is packed or kept."""
        return self

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Tensor]:
        """The packed weights by name. Any error is kept in the config's ``failure`` too."""
        try:
            return {
                name: self._pack(name, value[0] if isinstance(value, list) else value)
                for name, value in input_dict.items()
            }
        except Exception as error:  # raised again, and kept: transformers keeps only its text
            config = self.quantization_config
            config.failure = config.failure or error
            raise

    def _pack(self, name: str, weight: Tensor) -> Tensor:
        """Pack ``weight``; returns an empty tensor for the dense one, or ``weight`` where its shape is wrong."""
        config = self.quantization_config
        expected = self.places[name].dense.shape if name in self.places else self.kept[name]
        if weight.shape != expected:
            config.misshapen[name] = (weight.shape, expected)
            self.places.pop(name, None)
            self.kept.pop(name, None)
            return weight
        if name in self.kept:
            return config.keep(weight)
        packed = self.packed[name] = self.places[name].packed(weight, config.base)
        if isinstance(packed, QuantisedLinear):
            packed.bias = None  # it comes by itself
        for inner, held in list(packed.named_parameters()):
            if config.keep is not None:
                packed.register_parameter(inner, nn.Parameter(config.keep(held), requires_grad=False))
        return torch.empty(0, dtype=weight.dtype, device=weight.device)

    def postprocess_model(self, model: PreTrainedModel, **__: Any) -> None:
        """Puts the packed weights into their places; the model then names no quantizer."""
        for name, packed in self.packed.items():
            self.places[name].take(packed)
        del model.hf_quantizer, model.config.quantization_config

    def is_serializable(self, *_: Any) -> bool:
        """False: packed weights are not saved by transformers."""
        return False

    @property
    def is_trainable(self) -> bool:
        """True: adapters on packed linears train."""
        return True
