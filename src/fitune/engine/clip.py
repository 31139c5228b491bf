"""The size of all gradients together, and how far they must shrink."""

from collections.abc import Iterable

import torch
from torch import Tensor


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """L2 norm over all gradients as one fp32 scalar (Pascanu et al. 2013, arXiv 1211.5063)."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: float, *, max_norm: float) -> float:
    """What to multiply the gradients by so that their norm is at most ``max_norm``; 1.0 when ``max_norm`` is 0."""
    return 1.0 if max_norm <= 0 or norm <= max_norm else max_norm / norm
