"""LoRA on the stacked matrices of experts: a low-rank pair for each expert, in PEFT's own layers and files.

PEFT's ``ParamWrapper`` holds the pairs and, to run, makes W + scaling · B A of all experts whole, and its gradient
too. Here each pair of token and expert goes through A and B of its expert (models/experts.py): the same sum, without a
tensor of the size of W, and beside a packed W as well.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import transformers_weight_conversion as conversion
from torch import Tensor, nn

from fitune.models.experts import STACKS, is_experts, packed_stack_of, run_by, stack_shape


def stacks_among(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The ``targets`` that are stacks of experts somewhere in ``model``; a bare ``down_proj`` is the linears' name."""
    found = {
        f"{name}.{stack}"
        for name, module in model.named_modules()
        if is_experts(module)
        for stack in STACKS
        if stack_shape(module, stack) is not None
    }
    named = [target for target in targets if "." in target]
    return [target for target in named if any(name.endswith(f".{target}") for name in found)]


@contextmanager
def names_as_given() -> Iterator[None]:
    """While PEFT looks for linears: it takes each name for the linears that have it.

    PEFT (up to 0.21 at least, huggingface/peft issue 3711) takes gate_proj, up_proj and down_proj of many mixtures
    for the experts' linears of transformers 4. It would adapt the stacks of experts instead, at twice the rank, and
    neither shared experts nor dense blocks.
    """
    before = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = before


@contextmanager
def stacks_shown(model: nn.Module) -> Iterator[None]:
    """Packed stacks are parameters again while PEFT looks for them: of the right shape and type, without bytes."""
    shown: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name in STACKS:
            packed = packed_stack_of(module, name)
            if packed is not None:
                whole = torch.empty((), dtype=packed.dtype, device=packed.weight.device).expand(packed.shape)
                module.register_parameter(name, nn.Parameter(whole, requires_grad=False))
                shown.append((module, name))
    try:
        yield
    finally:
        for module, name in shown:
            module.register_parameter(name, None)


def run_with_adapters(adapted: nn.Module) -> None:
    """Let experts run their adapters themselves, instead of PEFT around them."""
    for wrapper in [m for m in adapted.modules() if isinstance(m, ParamWrapper)]:
        if not is_experts(wrapper.get_base_layer()):  # a router's matrix, which PEFT wraps for all-linear
            continue
        run_by(wrapper.get_base_layer(), wrapper.parameter_name, partial(_factors, wrapper))
        wrapper.__dict__["forward"] = MethodType(_through, wrapper)


def _through(wrapper: ParamWrapper, x: Tensor, *args: object, **words: object) -> Tensor:
    """The experts inside, which add what the wrapper's pairs make of each token."""
    return wrapper.base_layer(x, *args, **words)


def _factors(wrapper: ParamWrapper) -> tuple[Tensor, Tensor, float] | None:
    """A and B of a wrapper, as they are when experts run: shared out by FSDP2 they are whole only then."""
    if wrapper.disable_adapters or wrapper.merged:
        return None
    (name,) = wrapper.active_adapters
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    return *pairs_of_experts(a, b, wrapper.num_experts), wrapper.scaling[name]


def pairs_of_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """A [E, r, in] and B [E, out, r] of PEFT's [E · r, in] and [out, r · E]."""
    a_ERI = a.view(experts, -1, a.shape[-1])
    b_EOR = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
    return a_ERI, b_EOR
