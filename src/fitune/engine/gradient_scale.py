"""Size of all gradients together, how far they must shrink, and the loss scale of fp16.

Loss scaling is dynamic (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fitune.engine.protocol import Update
from fitune.errors import TrainingFailed
from fitune.values.plan import Precision


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """L2 norm over all gradients as one fp32 scalar (Pascanu et al. 2013, arXiv 1211.5063).

    Small ones go in one launch. A large one is longer at work than its launch, and there its partial sums would be
    kept for every other too.
    """
    gradients = list(gradients)
    small = [g for g in gradients if g.numel() <= _SMALL]
    together = iter(torch._foreach_norm(small, dtype=torch.float32) if small else ())
    norms = [
        next(together) if g.numel() <= _SMALL else torch.linalg.vector_norm(g, dtype=torch.float32)
        for g in gradients
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


_SMALL = 2**22
"""Elements: 64 partial sums each on CUDA."""


def clip_on_device(norm: Tensor, *, max_norm: float, scale: float) -> Tensor:
    """``clip_factor`` of ``norm`` / ``scale``, over ``scale``, as an fp32 scalar that nobody waits for.

    NaN where the norm is not finite. In fp64 until the end, as on the host: both round alike.
    """
    factor = (max_norm * scale / norm.double()).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return torch.where(norm.isfinite(), factor / scale, torch.nan).float()


def clip_factor(norm: float, *, max_norm: float) -> float:
    """Factor for the gradients so that their norm is at most ``max_norm``; 1.0 when ``max_norm`` is 0."""
    return 1.0 if max_norm <= 0 or norm <= max_norm else max_norm / norm


_FIRST_SCALE, _LEAST_SCALE = 2.0**16, 1.0
_CLEAN_STEPS = 1000
"""Steps in a row without overflow, after which the scale doubles."""
_FUTILE_STEPS = 20
"""Overflows in a row at the smallest scale, after which the run ends."""


class LossScale:
    """Halves when gradients overflow, doubles after enough clean steps; always 1 but in fp16."""

    def __init__(self, precision: Precision) -> None:
        self.is_used = precision is Precision.FP16
        self.value = _FIRST_SCALE if self.is_used else 1.0
        self.clean_steps = 0
        self.futile_steps = 0
        """Overflows in a row at the smallest scale."""

    def after_step(self, norm: float, *, skipped: bool) -> Update:
        """The result of a step whose gradients had ``norm`` without the scale, which is adapted to it.

        Raises TrainingFailed where a skipped step leaves nothing to halve: without a scale at once, at the smallest
        one after too many of them.
        """
        used = self.value
        if skipped and not self.is_used:
            raise TrainingFailed(
                f"the gradients are not finite (norm {norm}); nothing was updated",
                hint="lower learning_rate, set max_grad_norm, or look at those rows",
            )
        if skipped:
            self.clean_steps = 0
            self.futile_steps = self.futile_steps + 1 if self.value <= _LEAST_SCALE else 0
            if self.futile_steps >= _FUTILE_STEPS:
                raise TrainingFailed(
                    f"fp16 gradients overflowed in {self.futile_steps} steps in a row at the smallest loss scale "
                    f"({_LEAST_SCALE:g}); none of them changed a weight",
                    hint="precision: bf16-master or fp32, a lower learning_rate, or a model that was made for fp16",
                )
            self.value = max(_LEAST_SCALE, self.value / 2)
        elif self.is_used:
            self.futile_steps = 0
            self.clean_steps += 1
            if self.clean_steps >= _CLEAN_STEPS:
                self.value *= 2
                self.clean_steps = 0
        return Update(grad_norm=norm, loss_scale=used, skipped=skipped)

    def facts(self) -> dict[str, float]:
        """What a checkpoint keeps of it: nothing where it is always 1."""
        counts = {"clean_steps": self.clean_steps, "futile_steps": self.futile_steps}
        return {"loss_scale": self.value, **counts} if self.is_used else {}

    def restore(self, facts: dict[str, float]) -> None:
        """Go on from what ``facts`` says."""
        if self.is_used:
            self.value = facts["loss_scale"]
            self.clean_steps, self.futile_steps = int(facts["clean_steps"]), int(facts.get("futile_steps", 0))
