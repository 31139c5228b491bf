"""The engine as the training loop calls it, and the model as an engine calls it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fitune.engine.ranks import local_part
from fitune.values.predictions import Phase

EnterPhase = Callable[[Phase], None]
"""Told whenever the step passes into another phase, so that memory can be measured by phase."""


class LossModel(Protocol):
    """A model in two halves, so that the loss can run while the blocks wait."""

    @property
    def whole(self) -> nn.Module:
        """All of it."""
        ...

    def hidden_states(self, batch: Any) -> Tensor:
        """Last hidden states [T, D] of one micro-batch."""
        ...

    def divisor(self, *, rows: int, supervised_tokens: int) -> int:
        """Number that the summed loss of so many rows, with labels for so many tokens, is divided by."""
        ...

    def loss_and_gradient(self, hidden_TD: Tensor, batch: Any, *, scale: float) -> tuple[Tensor, Tensor]:
        """Summed loss (fp32 scalar, nats), and ``scale`` times its gradient for the hidden states [T, D]."""
        ...

    def loss(self, batch: Any) -> Tensor:
        """Summed loss without gradients, for evaluation."""
        ...


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

    tensors: Mapping[str, Tensor]
    facts: dict[str, float]


@runtime_checkable
class InParts(Protocol):
    """Whole tensors by name, as of a checkpoint, of which a rank can read only its rows (checkpoint/slices.py)."""

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; nothing is read."""
        ...

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Indices ``start`` to ``stop`` of the tensor along ``dim``."""
        ...


class Lazy(Mapping[str, Tensor]):
    """Tensors of which each is made by ``read`` when it is asked for, under ``names``."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def shape_of(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """Shape of one of ``tensors``; it is not read for that."""
    return tensors.shape(name) if isinstance(tensors, InParts) else tensors[name].shape


class Engine(ABC):
    """Turns losses into new weights. What saves and resumes is here for trained weights of which a rank has all."""

    model: LossModel
    """Its loss is trained, and evaluated."""
    parameters: dict[str, Parameter]
    """The trained weights by name."""

    @abstractmethod
    def forward_backward(
        self, batch: Any, *, divisor: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """Add the gradients of one micro-batch; returns its summed loss (nats, fp32 scalar).

        ``divisor`` is that of the whole global batch, of all ranks: gradients are those of its mean
        loss. ``last``: no other micro-batch of this step follows, so gradients can go to the other ranks.
        """

    @abstractmethod
    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Clip, step, and forget the gradients. Raises TrainingFailed when they are not finite."""

    # Each engine has these two of its own. They are not abstract: OnShares (engine/fsdp.py) stands between and calls
    # those of the engine by super(), which a type checker refuses for an abstract method.
    def state(self) -> EngineState:
        """The states of the engine's optimizer, divided over ranks as the weights are."""
        raise NotImplementedError

    def restore(self, state: EngineState) -> None:
        """Go on where ``state``, of whole tensors like those of ``put_back``, was taken; ``put_back`` comes first."""
        raise NotImplementedError

    def resident(self) -> list[Tensor]:
        """This rank's tensors that stay between two steps, beside the model's own: its part of all states."""
        return [local_part(tensor) for tensor in self.state().tensors.values()]

    def rest(self) -> None:  # noqa: B027  (not abstract: FSDP2 alone gathers)
        """Let go of what a forward without backward gathered: between two steps only the states stay."""

    def trained(self) -> dict[str, Tensor]:
        """The trained weights by name; what is divided over ranks is a DTensor: each rank saves its part."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Give the trained weights the values of ``weights``, whole tensors under the same names.

        Each is read when it is asked for, so take one after the other; where they are InParts, a rank may take its
        rows alone.
        """
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
