"""The type that a model's weights have on disk."""

from collections import Counter

import torch

from fitune.models.weight_files import stored_tensors
from fitune.models.weights import model_folder

_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(path: str) -> torch.dtype | None:
    """Type of most of the weights at ``path``, by their headers; None for a type that is not trained in."""
    sizes: Counter[str] = Counter()
    for tensor in stored_tensors(model_folder(path)).values():
        sizes[tensor.dtype] += tensor.size_bytes
    (name, _), *_ = sizes.most_common(1)
    return _NAMES.get(name)
