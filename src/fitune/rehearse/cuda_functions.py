"""Functions that work otherwise on CUDA than on the CPU whose fake device stands for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Inside, dropout keeps what CUDA's kernels keep.

    On CUDA dropout is one kernel with a mask of one byte per element (aten::native_dropout); the CPU multiplies by a
    mask of the input's dtype. CUDA's fused attention drops out by itself, from a seed; the CPU's cannot, and the
    scores would be written out. The functions themselves are replaced: a TorchFunctionMode is off in backward, where
    recomputed blocks run again.
    """
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def attend(*args: Any, **words: Any) -> torch.Tensor:
        return attention(*args, **{**words, "dropout_p": 0.0})

    F.dropout, F.scaled_dot_product_attention = _dropout, attend
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = dropout, attention


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Named as torch names them: callers use the words."""
    if not training or p == 0:
        return input
    output, _ = torch.native_dropout(input, p, True)
    return output
