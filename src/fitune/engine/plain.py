"""The ordinary engine: gradients of the whole global batch, then one optimizer step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.gradient_scale import LossScale, clip_factor, clip_on_device, global_norm
from fitune.engine.host import HostMemory
from fitune.engine.host_optimizer import HostOptimizer
from fitune.engine.optimizers import DirectOptimizer, MasterOptimizer, WeightOptimizer
from fitune.engine.protocol import Engine, EngineState, EnterPhase, LossModel, Update
from fitune.values.plan import Optimizer, Precision
from fitune.values.predictions import Phase


class Seed(torch.autograd.Function):
    """A loss without elements whose gradients for its inputs are known: backward hands them on, and keeps none."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        """An fp32 tensor of shape [0]; ``gradients`` are those of ``inputs``, in order."""
        ctx.gradients = gradients
        return inputs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """The gradients, which can be had once."""
        gradients, ctx.gradients = ctx.gradients, []
        return None, *gradients


class PlainEngine(Engine):
    """Backward through autograd, clipping by global norm, AdamW or SGD."""

    def __init__(
        self,
        model: LossModel,
        parameters: Mapping[str, Parameter],
        *,
        optimizer: Optimizer,
        precision: Precision,
        max_grad_norm: float,
        host: HostMemory | None = None,
        blocks: Sequence[Sequence[str]] = (),
    ) -> None:
        """With ``host`` the optimizer is there; ``blocks`` names the trained parameters of each decoder block."""
        self.model = model
        self.parameters = dict(parameters)
        self.max_grad_norm = max_grad_norm
        self.loss_scale = LossScale(precision)
        self.optimizer: WeightOptimizer
        if host is not None:
            self.optimizer = HostOptimizer(self.parameters, optimizer, host=host, blocks=blocks)
        elif precision.has_master:
            self.optimizer = MasterOptimizer(self.parameters, optimizer)
        else:
            self.optimizer = DirectOptimizer(self.parameters, optimizer)

    def forward_backward(
        self, batch: Any, *, divisor: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """The loss runs on detached hidden states, so its logits are gone before the blocks' backward begins."""
        enter_phase(Phase.FORWARD)
        hidden_TD = self.model.hidden_states(batch)
        enter_phase(Phase.LOSS)
        loss, gradient_TD = self.model.loss_and_gradient(
            hidden_TD.detach(), batch, scale=self.loss_scale.value / divisor
        )
        seed = Seed.apply([gradient_TD], hidden_TD)
        del hidden_TD, gradient_TD  # backward lets go of both before it reaches the blocks
        self.optimizer.take_gradients(wait=False)
        enter_phase(Phase.BACKWARD)
        seed.backward(seed.detach())
        self.optimizer.take_gradients(wait=True)
        return loss

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Steps the optimizer with clipped gradients and drops them; fp16 gradients that overflowed are skipped."""
        enter_phase(Phase.UPDATE)
        scale, measured, optimizer = self.loss_scale.value, self.gradient_norm(), self.optimizer
        unread = optimizer.skips_on_device
        if unread:  # so the device has work until the norm is known here
            on_device = clip_on_device(measured, max_norm=self.max_grad_norm, scale=scale)
            optimizer.step(learning_rate=learning_rate, gradient_factor=on_device)
        norm = measured.item() / scale
        finite = math.isfinite(norm)
        if finite and not unread:
            factor = clip_factor(norm, max_norm=self.max_grad_norm) / scale
            optimizer.step(learning_rate=learning_rate, gradient_factor=factor)
        optimizer.drop_gradients()
        return self.loss_scale.after_step(norm, skipped=not finite)

    def state(self) -> EngineState:
        """The optimizer's, and the loss scale."""
        return EngineState(tensors=self.optimizer.tensors(), facts=self.loss_scale.facts())

    def restore(self, state: EngineState) -> None:
        """Go on from ``state``."""
        self.optimizer.restore(state.tensors)
        self.loss_scale.restore(state.facts)

    def gradient_norm(self) -> Tensor:
        """Norm of all gradients together, before clipping and with the loss scale."""
        return global_norm(self.optimizer.gradients())
