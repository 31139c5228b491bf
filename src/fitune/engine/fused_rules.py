"""Rules that use one gradient in backward. A rule may write over it; ``factor`` undoes clip and loss scale.

Symbols as in the papers: θ weight, g gradient, α learning rate, λ weight decay, of matrices only as everywhere here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.optimizers import DirectOptimizer, MasterOptimizer, set_learning_rate, takes_decay
from fitune.values.choices import ADALOMO_ROWS
from fitune.values.plan import Lomo, Optimizer, Precision, Tuning

_EPS_SQUARE = 1e-30
"""Added to the mean squares, so that a weight without gradient divides by something (Adafactor's ε₁)."""
_EPS_WEIGHT = 1e-3
"""The least scale of a weight, so that zeros can leave zero (Adafactor's ε₂)."""
_DECAY = 0.8
"""β_t = 1 − t^−0.8 (Shazeer & Stern 2018, arXiv 1804.04235, section 7.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Placement of one weight: all of it here, or divided along ``dim`` over the ranks of ``group``."""

    shape: torch.Size
    """Shape of the whole weight."""
    dim: int | None = None
    group: dist.ProcessGroup | None = None

    def divides(self, dim: int) -> bool:
        """True if sums over ``dim`` need the other ranks; a negative dim counts from the end."""
        return dim % len(self.shape) == self.dim

    def summed(self, part: Tensor) -> Tensor:
        """``part``, added up over the ranks in place."""
        if self.dim is not None:
            dist.all_reduce(part, group=self.group)
        return part

    def rms(self, share: Tensor) -> Tensor:
        """Root mean square of the whole tensor that ``share`` is this rank's part of, fp32 scalar."""
        norm: Tensor = torch.linalg.vector_norm(share, dtype=torch.float32)
        if self.dim is not None:
            norm = self.summed(norm.square_()).sqrt_()
        return norm / self.shape.numel() ** 0.5

    def mean_square(self, share: Tensor, dim: int) -> Tensor:
        """Mean of the squares along ``dim``, plus ε₁. It comes from a norm: no square is ever held."""
        squared = _norms(share, dim).square_()
        if self.divides(dim):
            self.summed(squared)
        return squared.div_(self.shape[dim]).add_(_EPS_SQUARE)

    def mean_of_rows(self, row: Tensor) -> Tensor:
        """Mean of the rows' factor over all rows of each matrix, its dimension kept."""
        if not self.divides(-2):
            return row.mean(dim=-1, keepdim=True)
        return self.summed(row.sum(dim=-1, keepdim=True)).div_(self.shape[-2])


def _norms(share: Tensor, dim: int) -> Tensor:
    """Norms along ``dim``; of columns as norms of those of every 512 rows, which take 2/512 of ``share`` at most."""
    whole, rest = divmod(share.shape[-2], ADALOMO_ROWS)
    if dim != -2 or whole + bool(rest) <= 1:
        return torch.linalg.vector_norm(share, dim=dim)
    in_parts = share[..., : whole * ADALOMO_ROWS, :].unflatten(-2, (whole, ADALOMO_ROWS))
    norms = torch.linalg.vector_norm(in_parts, dim=-2)
    if rest:
        last = torch.linalg.vector_norm(share[..., whole * ADALOMO_ROWS :, :], dim=-2, keepdim=True)
        norms = torch.cat([norms, last], dim=-2)
    return torch.linalg.vector_norm(norms, dim=-2)


class UpdateRule(ABC):
    """Update of one weight by its gradient; without states where a class does not say otherwise."""

    def begin(self) -> None:  # noqa: B027  (most count no steps)
        """A step begins."""

    @abstractmethod
    def use(self, name: str, gradient: Tensor, *, learning_rate: float, factor: float) -> None:
        """Update weight ``name``; may write over ``gradient``."""

    def tensors(self) -> dict[str, Tensor]:
        """States by the names that checkpoints give them."""
        return {}

    def facts(self) -> dict[str, float]:
        """What else a checkpoint keeps."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, float]) -> None:  # noqa: B027
        """Go on from what ``tensors`` and ``facts`` returned."""


def rule_for(
    parameters: Mapping[str, Parameter],
    *,
    tuning: Tuning,
    optimizer: Optimizer,
    precision: Precision,
    divisions: Mapping[str, Division] | None = None,
) -> UpdateRule:
    """LOMO's, AdaLomo's, or the optimizer's, on fp32 masters where the precision has them.

    ``divisions``: of the weights that ``parameters`` are only this rank's shares of.
    """
    match tuning:
        case Lomo(adaptive=True):
            return AdaLomoRule(parameters, weight_decay=optimizer.weight_decay, divisions=divisions or {})
        case Lomo():
            return SgdRule(parameters, weight_decay=optimizer.weight_decay)
    return OptimizerRule(parameters, optimizer, masters=precision.has_master)


class SgdRule(UpdateRule):
    """θ ← θ − α (g + λ θ), the very operations of torch.optim.SGD (Lv et al. 2023, arXiv 2306.09782, algorithm 1)."""

    def __init__(self, parameters: Mapping[str, Parameter], *, weight_decay: float) -> None:
        self.parameters = dict(parameters)
        self.weight_decay = weight_decay

    @torch.no_grad()
    def use(self, name: str, gradient: Tensor, *, learning_rate: float, factor: float) -> None:
        """The factor goes into the step: a gradient scaled up for fp16 would vanish if it were scaled down first."""
        weight = self.parameters[name]
        if self.weight_decay and takes_decay(name, weight):
            if gradient.dtype == torch.float16:  # beside a gradient that is scaled up it would overflow
                weight.mul_(1 - learning_rate * self.weight_decay)
            else:
                gradient.add_(weight, alpha=self.weight_decay / factor)
        weight.add_(gradient, alpha=-learning_rate * factor)


class OptimizerRule(UpdateRule):
    """One weight's share of a step of any optimizer (optimizers.py), with the same states under the same names."""

    def __init__(self, parameters: Mapping[str, Parameter], optimizer: Optimizer, *, masters: bool) -> None:
        self.parameters = dict(parameters)
        kind = MasterOptimizer if masters else DirectOptimizer
        self.optimizer = kind(self.parameters, optimizer)
        groups = self.optimizer.torch_optimizer.param_groups
        self._group_of = {p: {**group, "params": [p]} for group in groups for p in group["params"]}

    @torch.no_grad()
    def use(self, name: str, gradient: Tensor, *, learning_rate: float, factor: float) -> None:
        """The optimizer is shown one parameter: it would look through all of them for gradients."""
        weight, torch_optimizer = self.parameters[name], self.optimizer.torch_optimizer
        stepped = self.optimizer.masters.get(name, weight)
        stepped.grad = gradient.to(stepped.dtype)
        if factor != 1.0:
            stepped.grad.mul_(factor)
        torch_optimizer.param_groups = [self._group_of[stepped]]
        set_learning_rate(torch_optimizer, learning_rate)
        torch_optimizer.step()
        stepped.grad = None
        if stepped is not weight:
            weight.copy_(stepped)

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's states, and the masters where there are any."""
        return self.optimizer.tensors()

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, float]) -> None:
        """``facts`` are not needed: the optimizer's tensors hold its step counts."""
        self.optimizer.restore(tensors)


class AdaLomoRule(UpdateRule):
    """Adafactor's step, parameter by parameter (Lv et al. 2023, arXiv 2310.10195, algorithm 1).

    A matrix keeps the means r of its squared gradients over rows, and c over columns; v = r cᵀ / mean(r), a vector
    keeps v itself. u = g / √v; û = u / max(1, rms(u)) · max(ε, rms(θ)); θ ← θ − α û, λ relative to the same scale.
    Stacked matrices (experts) are matrices each. States and arithmetic are in fp32. Means are over the whole weight,
    also where this rank has only a share of it: then the ranks exchange sums, never a gradient.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        weight_decay: float,
        divisions: Mapping[str, Division],
    ) -> None:
        self.parameters = dict(parameters)
        self.weight_decay = weight_decay
        here = {name: Division(shape=p.shape) for name, p in self.parameters.items()}
        self.divisions = {**here, **divisions}
        self.steps = 0
        self.states: dict[str, Tensor] = {}
        """``row/`` and ``column/<weight>`` of matrices, ``square/<weight>`` of vectors, fp32."""
        for name, p in self.parameters.items():
            if p.ndim < 2:
                self.states[f"square/{name}"] = torch.zeros_like(p, dtype=torch.float32)
            else:
                row = torch.zeros(p.shape[:-1], dtype=torch.float32, device=p.device)
                self.states[f"row/{name}"] = row
                self.states[f"column/{name}"] = row.new_zeros((*p.shape[:-2], p.shape[-1]))

    def begin(self) -> None:
        """Counts the step: β_t depends on it."""
        self.steps += 1

    @torch.no_grad()
    def use(self, name: str, gradient: Tensor, *, learning_rate: float, factor: float) -> None:
        """One step in fp32; ``learning_rate`` is relative to the weight's own scale."""
        weight, division = self.parameters[name], self.divisions[name]
        step = gradient.float()
        if factor != 1.0:
            step.mul_(factor)
        self._divide_by_root(name, step)
        rms_weight = division.rms(weight).clamp_(min=_EPS_WEIGHT)
        step.div_(division.rms(step).clamp_(min=1.0))
        if self.weight_decay and takes_decay(name, weight):
            weight.mul_(1 - learning_rate * self.weight_decay * rms_weight)
        step.mul_(rms_weight)
        weight.add_(step, alpha=-learning_rate)

    def tensors(self) -> dict[str, Tensor]:
        """The states."""
        return dict(self.states)

    def facts(self) -> dict[str, float]:
        """The steps done, t of β_t."""
        return {"steps": self.steps}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, float]) -> None:
        """Copies into the states that are there; raises KeyError when one is missing."""
        self.steps = int(facts["steps"])
        for key, state in self.states.items():
            state.copy_(tensors[key])

    def _divide_by_root(self, name: str, step: Tensor) -> None:
        """g / √v in place, after v has learned of g."""
        share = self.steps**-_DECAY
        if f"square/{name}" in self.states:
            square = self.states[f"square/{name}"].lerp_(step.square().add_(_EPS_SQUARE), share)
            step.mul_(square.rsqrt())
            return
        row, column = (self.states[f"{kind}/{name}"] for kind in ("row", "column"))
        division = self.divisions[name]
        row.lerp_(division.mean_square(step, -1), share)
        column.lerp_(division.mean_square(step, -2), share)
        step.mul_((row / division.mean_of_rows(row)).rsqrt_().unsqueeze(-1))
        step.mul_(column.rsqrt().unsqueeze(-2))
