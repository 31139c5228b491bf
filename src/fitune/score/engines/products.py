"""Matrix products of linear layers on a processor, by oneDNN where it is faster than the BLAS of torch.

In fp32 torch multiplies by MKL, which on AMD's processors leaves half of their vector units unused: on an EPYC with
AVX-512, one thread, [300, 256] times [256, 512] takes 732 µs by MKL, 341 µs by oneDNN (torch 2.13); of 64 rows and more
all shapes from 256 to 32,000 take half as long or less. No processor of Intel's was measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LEAST_PRODUCTS = 2**21
"""Multiplications from which oneDNN is faster, weights not in the cache; its call takes 8 µs more."""
_LEAST_ROWS = 8


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Linear layers in fp32 on a processor multiply by oneDNN; as before afterwards. Inference only: no gradients."""
    changed = [module for module in model.modules() if _is_plain(module)]
    for module in changed:
        module.forward = partial(_multiply, module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _is_plain(module: nn.Module) -> bool:
    """True for torch's own linear layer in fp32 on a processor, whose forward nobody has replaced."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _multiply(linear: Any, hidden: Tensor) -> Tensor:
    """``linear`` of ``hidden`` [..., D]."""
    weight_ED, bias = linear.weight, linear.bias
    rows = hidden.numel() // hidden.shape[-1]
    is_large = rows >= _LEAST_ROWS and rows * weight_ED.numel() >= LEAST_PRODUCTS
    if not is_large or torch.is_grad_enabled() or hidden.dtype != torch.float32:
        return functional.linear(hidden, weight_ED, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, weight_ED, bias, "none", [], "")
    return product
