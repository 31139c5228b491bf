"""Routing fixed over two models: both send each token to the same experts, so that logits can be compared.

A router takes the k largest of its scores. Where two are nearly equal, one rounding of a weight far before it swaps
them, and the token goes another way: logits of two right models then differ by far more than rounding explains.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

Routes = Mapping[str, tuple[Tensor, ...]]
"""Name of a router -> what it answered: scores, weights and numbers of the chosen experts."""


@contextmanager
def recorded_routes(model: PreTrainedModel | PeftModel) -> Iterator[Routes]:
    """Yields a mapping that the routers of ``model`` write into while they run, each its last answer."""
    routes: dict[str, tuple[Tensor, ...]] = {}

    def record(name: str, output: Any) -> None:
        if _chooses(output):
            routes[name] = tuple(tensor.detach().cpu() for tensor in output)

    with _hooked(model, record):
        yield routes


@contextmanager
def fixed_routes(model: PreTrainedModel | PeftModel, routes: Routes) -> Iterator[None]:
    """While it lasts, the routers of ``model`` answer as recorded."""

    def answer(name: str, output: Any) -> Any:
        if name not in routes:
            return None
        return tuple(
            wanted.to(own.device, own.dtype) for wanted, own in zip(routes[name], output, strict=True)
        )

    with _hooked(model, answer):
        yield


def has_routers(model: PreTrainedModel | PeftModel) -> bool:
    """True if the config of ``model`` says that tokens choose among experts."""
    config = _base(model).config.get_text_config()
    return any((getattr(config, name, 0) or 0) > 1 for name in _EXPERTS)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@contextmanager
def _hooked(model: PreTrainedModel | PeftModel, hook: Callable[[str, Any], Any]) -> Iterator[None]:
    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda _module, _inputs, output: hook(name, output)

    modules = _base(model).named_modules() if has_routers(model) else ()
    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _chooses(output: Any) -> bool:
    """True if a module answered as transformers' routers do: tensors alone, and the numbers of experts among them."""
    if not isinstance(output, tuple) or not all(isinstance(tensor, Tensor) for tensor in output):
        return False
    return any(tensor.dtype == torch.int64 for tensor in output)


def _base(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model
