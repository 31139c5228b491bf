"""A weight is updated inside backward, as soon as its gradient exists, which is then let go of.

So do LOMO (Lv et al. 2023, arXiv 2306.09782), AdaLomo (2310.10195), and here any optimizer that is asked to:
fused_rules.py. One gradient is alive at a time, at most the largest parameter's. The graph waits between
``forward_backward``, which ends with the loss, and ``update``, which knows the learning rate and runs backward. To
clip by the norm of all gradients, or to skip a step that overflows in fp16, backward runs twice: first to measure,
then to update.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.fused_rules import UpdateRule
from fitune.engine.gradient_scale import LossScale, clip_factor
from fitune.engine.plain import Seed
from fitune.engine.protocol import Engine, EngineState, EnterPhase, LossModel, Update
from fitune.errors import TrainingFailed
from fitune.values.plan import ClipByNorm, ClipByValue, Precision
from fitune.values.predictions import Phase

_Visit = Callable[[str, Tensor], None]


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A micro-batch whose loss is known and whose backward is still to run."""

    batch: Any
    scale: float
    hidden_TD: Tensor
    gradient_TD: Tensor
    head_trains: bool


class InBackwardEngine(Engine):
    """A rule for one gradient, fused into backward. No accumulation: gradients never add up.

    ``parameters`` are where autograd, or what sums the gradients of several ranks, leaves a gradient.
    """

    def __init__(
        self,
        model: LossModel,
        parameters: Mapping[str, Parameter],
        *,
        rule: UpdateRule,
        clip: ClipByValue | ClipByNorm,
        precision: Precision,
        used_twice: Collection[str] = (),
    ) -> None:
        """``used_twice`` names what both head and body use: its gradient waits until both have added to it."""
        self.model = model
        self.parameters = dict(parameters)
        self.rule = rule
        self.clip = clip
        self.used_twice = frozenset(used_twice)
        self.loss_scale = LossScale(precision)
        self._waiting: _Waiting | None = None
        self._visit: _Visit | None = None
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._complete, name))

    def forward_backward(
        self, batch: Any, *, divisor: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """Forward and loss; backward waits for the learning rate."""
        if self._waiting is not None:
            raise TrainingFailed(
                "a gradient that is used as soon as it exists cannot be added to those of other micro-batches",
                hint="gradient_accumulation_steps: 1",
            )
        enter_phase(Phase.FORWARD)
        hidden_TD = self.model.hidden_states(batch)
        enter_phase(Phase.LOSS)
        scale = self.loss_scale.value / divisor
        loss, gradient_TD = self.model.loss_and_gradient(hidden_TD.detach(), batch, scale=scale)
        self._waiting = _Waiting(
            batch=batch,
            scale=scale,
            hidden_TD=hidden_TD,
            gradient_TD=gradient_TD,
            head_trains=self._loss_left_gradients(),
        )
        return loss

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Backward, with the update of each weight in it. Raises TrainingFailed when a gradient is not finite."""
        scale, factor, norm = self.loss_scale.value, 1.0, None
        max_norm = self.clip.max_norm if isinstance(self.clip, ClipByNorm) else 0.0
        if (max_norm > 0 or self.loss_scale.is_used) and self._waiting is not None:
            norm = self._measure(enter_phase) / scale
            if not math.isfinite(norm):
                self._waiting = None
                return self.loss_scale.after_step(norm, skipped=True)
            factor = clip_factor(norm, max_norm=max_norm)
            waiting = self._waiting
            if waiting.head_trains:  # its gradients were let go of with the others
                enter_phase(Phase.LOSS)
                self.model.loss_and_gradient(waiting.hidden_TD.detach(), waiting.batch, scale=waiting.scale)
            del waiting
        self.rule.begin()
        measured = Norm()

        def use(name: str, gradient: Tensor) -> None:
            """Counts the gradient, clips it by value where asked, and lets the rule use it."""
            measured.add(name, gradient)
            if isinstance(self.clip, ClipByValue):
                limit = min(self.clip.value * scale, torch.finfo(gradient.dtype).max)
                gradient.clamp_(-limit, limit)
            self.rule.use(name, gradient, learning_rate=learning_rate, factor=factor / scale)

        self._backward(use, enter_phase, keep=False)
        enter_phase(Phase.UPDATE)
        norm = self._total(measured) / scale if norm is None else norm
        if not math.isfinite(norm):
            raise TrainingFailed(
                f"the gradients are not finite (norm {norm}), and the weights have used them already",
                hint="continue from the last checkpoint with a lower learning_rate, or clip by norm, which looks first",
            )
        return self.loss_scale.after_step(norm, skipped=False)

    def state(self) -> EngineState:
        """The rule's, and the loss scale."""
        facts = {**self.rule.facts(), **self.loss_scale.facts()}
        return EngineState(tensors=self.rule.tensors(), facts=facts)

    def restore(self, state: EngineState) -> None:
        """Go on from ``state``."""
        self.rule.restore(state.tensors, state.facts)
        self.loss_scale.restore(state.facts)

    def _measure(self, enter_phase: EnterPhase) -> float:
        """Norm of all gradients, none of which is kept; the graph is, for the second pass."""
        measured = Norm()
        self._backward(measured.add, enter_phase, keep=True)
        return self._total(measured)

    def _backward(self, visit: _Visit, enter_phase: EnterPhase, *, keep: bool) -> None:
        """Every complete gradient is visited once: the head's first, then as backward makes them."""
        waiting = self._waiting
        self._visit = visit
        if waiting is not None:
            enter_phase(Phase.BACKWARD)
            for name, parameter in self.parameters.items():
                if name not in self.used_twice:
                    self._complete(name, parameter)
            seed = Seed.apply([waiting.gradient_TD], waiting.hidden_TD)
            if not keep:
                self._waiting = None
            del waiting  # as in engine/plain.py
            seed.backward(seed.detach(), retain_graph=keep)
        for name, parameter in self.parameters.items():  # what the body did not use after all
            self._complete(name, parameter)
        self._visit = None

    @torch.no_grad()
    def _complete(self, name: str, parameter: Tensor) -> None:
        """Called by autograd for each parameter that the body uses, and for the head's once the loss has left them."""
        gradient = parameter.grad
        if self._visit is not None and gradient is not None:
            parameter.grad = None
            self._visit(name, self._taken(name, gradient))

    def _taken(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient of ``name`` as the rule uses it."""
        return gradient

    def _loss_left_gradients(self) -> bool:
        """True if the loss has begun a gradient, of the head."""
        return any(parameter.grad is not None for parameter in self.parameters.values())

    def _total(self, measured: "Norm") -> float:
        """The norm of all gradients that were measured."""
        return measured.total()


class Norm:
    """The norm of all gradients together, added up as they come: one number is kept, not one for each."""

    def __init__(self) -> None:
        self.square: Tensor | None = None

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds the square of the gradient's norm, in fp32 on its device."""
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square_()
        self.square = square if self.square is None else self.square.add_(square)

    def total(self) -> float:
        """The norm of all that was added; waits for the device. 0 where nothing was."""
        return 0.0 if self.square is None else self.square.sqrt().item()
