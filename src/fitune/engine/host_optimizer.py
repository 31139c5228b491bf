"""The optimizer on the host: masters, states and update are there, and gradients go there as soon as they exist.

Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload). On the device are the weights and the gradients of at most two blocks:
of the one going back, and of the one behind it, which are leaving.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.optimizers import (
    build_torch_optimizer,
    restore_state,
    set_learning_rate,
    state_tensors,
)
from fitune.spec.plan import Optimizer


class MovingCopy(Protocol):
    """A copy that may still be on its way."""

    def wait(self) -> Tensor: ...

    def arrived(self) -> Tensor: ...


class Host(Protocol):
    """Memory beside the device (models/host.py)."""

    def working(self) -> AbstractContextManager[None]: ...

    def owns(self, tensor: Tensor) -> bool: ...

    def adopt(self, tensor: Tensor) -> None: ...

    def empty_like(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor: ...

    def take(self, tensor: Tensor) -> MovingCopy: ...

    def put(self, tensor: Tensor, target: Tensor) -> MovingCopy: ...


class HostOptimizer:
    """torch's fused CPU optimizer over fp32 masters, fed block by block.

    In fp32 it does what DirectOptimizer does, else what MasterOptimizer does; gradients of several micro-batches are
    added up in fp32.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizer: Optimizer,
        *,
        host: Host,
        blocks: Sequence[Sequence[str]],
    ) -> None:
        """``blocks`` names the trained parameters of each decoder block."""
        self.parameters = dict(parameters)
        self.host = host
        self.blocks = [list(names) for names in blocks]
        in_blocks = {name for names in self.blocks for name in names}
        self.around = [name for name in self.parameters if name not in in_blocks]
        with torch.no_grad(), host.working():
            self.masters = {name: self._master(p) for name, p in self.parameters.items()}
        self.torch_optimizer = build_torch_optimizer(self.masters, optimizer)
        self._sums: dict[str, Tensor] = {}
        self._leaving: list[tuple[str, Tensor, MovingCopy]] = []

    def goes_back(self, block: int) -> None:
        """Backward reaches ``block``: the gradients of the one behind it are complete and begin to leave."""
        self._carry(self.blocks[block + 1] if block + 1 < len(self.blocks) else self.around)

    def take_gradients(self, *, wait: bool) -> None:
        """The loss is through, or backward is: whatever there is begins to leave."""
        self._carry(self.parameters)
        if wait:
            self._settle()

    def gradients(self) -> list[Tensor]:
        """Sums over the micro-batches, in fp32, on the host."""
        self.take_gradients(wait=True)
        return [self._sums[name] for name in self.parameters if name in self._sums]

    def drop_gradients(self) -> None:
        self._settle()
        self._sums.clear()

    def step(self, *, learning_rate: float, gradient_factor: float) -> None:
        set_learning_rate(self.torch_optimizer, learning_rate)
        with self.host.working():
            for name, gradient in self._sums.items():
                self.masters[name].grad = gradient.mul_(gradient_factor)
            self._sums.clear()
            self.torch_optimizer.step()
            self.torch_optimizer.zero_grad(set_to_none=True)
        self._adopt_states()
        self._give_back_weights()

    def tensors(self) -> dict[str, Tensor]:
        masters = {f"master/{name}": master.data for name, master in self.masters.items()}
        return {**masters, **state_tensors(self.torch_optimizer, self.masters)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """A state without masters is of an optimizer that stepped the weights themselves."""
        with torch.no_grad(), self.host.working():
            for name, master in self.masters.items():
                master.copy_(tensors.get(f"master/{name}", self.parameters[name]))
            restore_state(self.torch_optimizer, self.masters, tensors)
        self._adopt_states()

    def _master(self, parameter: Parameter) -> Parameter:
        return Parameter(self.host.empty_like(parameter, dtype=torch.float32).copy_(parameter))

    def _carry(self, names: Iterable[str]) -> None:
        """Add up the gradients copied before, and begin to copy those of ``names`` to the host."""
        self._settle()
        for name in names:
            parameter = self.parameters[name]
            if parameter.grad is not None:
                self._leaving.append((name, parameter.grad, self.host.take(parameter.grad)))
                parameter.grad = None

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, []
        with self.host.working():
            for name, _on_device, copy in leaving:
                gradient = copy.arrived()
                if name in self._sums:
                    self._sums[name].add_(gradient)
                else:
                    self._sums[name] = gradient.float()

    def _give_back_weights(self) -> None:
        """New weights in their own type; what waits on the host itself is written there."""
        under_way = []
        for name, parameter in self.parameters.items():
            master = self.masters[name].data
            if self.host.owns(parameter.data):
                parameter.data.copy_(master)
                continue
            if parameter.dtype != master.dtype:
                master = self.host.empty_like(master, dtype=parameter.dtype).copy_(master)
            under_way.append(self.host.put(master, parameter.data))
        for copy in under_way:
            copy.wait()

    def _adopt_states(self) -> None:
        for tensor in self.tensors().values():
            self.host.adopt(tensor)
