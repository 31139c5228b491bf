"""Protocols: the engine as the training loop calls it, and the model as an engine calls it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.spec.predictions import Phase

EnterPhase = Callable[[Phase], None]
"""Told whenever the step passes into another phase, so that memory can be measured by phase."""


class LossModel(Protocol):
    """A model in two halves, so that the loss can run while the blocks wait."""

    def hidden_states(self, batch: Any) -> Tensor: ...

    def loss_and_gradient(self, hidden_TD: Tensor, batch: Any, *, scale: float) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one optimizer step. ``grad_norm`` is taken before clipping and without the loss scale."""

    grad_norm: float
    loss_scale: float
    skipped: bool
    """True when fp16 gradients overflowed: nothing was changed but the loss scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """All that an engine must remember between steps, in what safetensors and JSON can hold."""

    tensors: dict[str, Tensor]
    facts: dict[str, float]


class Engine(Protocol):
    """How a loss becomes new weights."""

    def forward_backward(
        self, batch: Any, *, supervised_tokens: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """Add the gradients of one micro-batch; returns its summed loss (nats, fp32 scalar).

        ``supervised_tokens`` is the count of the whole global batch, of all ranks: gradients are those of its mean
        loss. ``last``: no other micro-batch of this step follows, so gradients can go to the other ranks.
        """
        ...

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Clip, step, and forget the gradients. Raises TrainingFailed when they are not finite."""
        ...

    def rest(self) -> None:
        """Let go of what a forward without backward gathered: between two steps only the states stay."""
        ...

    def trained(self) -> dict[str, Tensor]:
        """The trained weights by name; what is divided over ranks is a DTensor, to be gathered where it is used."""
        ...

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Give the trained weights the values of ``weights``, whole tensors under the same names."""
        ...

    def state(self) -> EngineState:
        """Divided over ranks as the weights are."""
        ...

    def restore(self, state: EngineState) -> None:
        """Continue exactly where ``state``, of whole tensors, was taken; trained weights must be put back before."""
        ...


class WholeWeights:
    """Trained weights of which a rank has all: an engine's part in saving and resuming them."""

    parameters: dict[str, Parameter]

    def rest(self) -> None:
        """Does nothing: no weight was gathered."""

    def trained(self) -> dict[str, Tensor]:
        """Returns the weights by name, on their own storage."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Copies ``weights`` into the parameters of the same names."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
