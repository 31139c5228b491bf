"""Functions that work otherwise on CUDA than on the CPU whose fake device stands for it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class CudaFunctions(TorchFunctionMode):
    """Inside, dropout keeps what CUDA's kernels keep.

    On CUDA dropout is one kernel with a mask of one byte per element (aten::native_dropout); the CPU multiplies by a
    mask of the input's dtype. CUDA's fused attention drops out by itself, from a seed; the CPU's cannot, and the
    scores would be written out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            words["dropout_p"] = 0.0
        if func is F.dropout:
            return _dropout(*args, **words)
        return func(*args, **words)


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Named as torch names them: callers use the words."""
    if not training or p == 0:
        return input
    output, _ = torch.native_dropout(input, p, True)
    return output
