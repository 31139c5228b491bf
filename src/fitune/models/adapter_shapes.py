"""The shapes of a base that an adapter's tensors must fit: of its linears, its stacks of experts, its tables."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from fitune.spec.model.model_spec import ModelSpec

Shape = tuple[int, ...]
Shapes = Mapping[str, tuple[int, int]]
"""Name of a linear in the model -> (in_features, out_features)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stacked matrices of a block's experts."""

    in_features: int
    out_features: int
    copies: int


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of every linear of a model without adapters, by name."""
    from transformers.pytorch_utils import Conv1D

    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            shapes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # GPT-2 keeps its weights transposed
            shapes[name] = (module.weight.shape[0], module.weight.shape[1])
    return shapes


def stack_shapes(model: nn.Module) -> dict[str, Stack]:
    """The stacks of experts of a model without adapters, packed or not, by name, in the order of their modules."""
    from fitune.models.experts import is_experts, shape_of

    found = {}
    for name, module in model.named_modules():
        if is_experts(module):
            for inner in module._parameters:
                shape = shape_of(module, inner)
                if shape is not None and len(shape) == 3:
                    copies, one, other = shape
                    into, out = (one, other) if getattr(module, "is_transposed", False) else (other, one)
                    found[f"{name}.{inner}"] = Stack(in_features=into, out_features=out, copies=copies)
    return found


def stacks_of(base: ModelSpec | Shapes) -> dict[str, Stack]:
    """The stacks of experts that a ModelSpec knows, by their names from the block's number on; none of bare shapes."""
    if not isinstance(base, ModelSpec):
        return {}
    return {
        f"layers.{layer}.{m.name}": Stack(
            in_features=m.in_features, out_features=m.out_features, copies=m.copies
        )
        for layer in range(base.num_layers)
        for m in base.linears_of(layer)
        if m.stacked
    }


def layers_around(wanted: Sequence[str], stacks: Mapping[str, Stack]) -> dict[str, Stack]:
    """PEFT's layer for each wanted stack: around a module's experts, those of the last stack outermost."""
    names: dict[str, list[str]] = {}
    for name in stacks:
        if any(name == each or name.endswith(f".{each}") for each in wanted):
            names.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        module + ".base_layer" * depth: stacks[name]
        for module, held in names.items()
        for depth, name in enumerate(reversed(held))
    }


def tensor_shapes(model: nn.Module) -> dict[str, Shape]:
    """Shape of every tensor of a model without adapters, by name; of one with two names, both."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def shape_in_base(module: str, base: ModelSpec | Shapes) -> tuple[int, int] | None:
    """(in_features, out_features), or None when the base has no linear of that name."""
    if not isinstance(base, ModelSpec):
        return base.get(module)
    if module == "lm_head":
        return base.hidden_size, base.vocab_size
    match = _IN_BLOCK.fullmatch(module)
    if match is None or int(match[1]) >= base.num_layers:
        return None
    found = [m for m in base.linears_of(int(match[1])) if m.name == match[2] and m.adaptable]
    return (found[0].in_features, found[0].out_features) if found else None


def table_shape(name: str, found: Shape, base: ModelSpec | Shapes) -> Shape | None:
    """(vocabulary, hidden size) of a table; None for a model without a head."""
    if not name.endswith(".weight") or len(found) != 2:
        return None
    if isinstance(base, ModelSpec):
        return base.vocab_size, base.hidden_size
    head = base.get("lm_head")
    return (head[1], head[0]) if head else None


_IN_BLOCK = re.compile(r".*?\.(\d{1,9})\.(.+)")


def from_block(name: str) -> str:
    """The name from the block number on: a ModelSpec does not know the part before it."""
    match = _IN_BLOCK.fullmatch(name)
    return f"layers.{match[1]}.{match[2]}" if match else name
