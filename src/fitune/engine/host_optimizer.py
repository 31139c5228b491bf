"""The optimizer on the host: masters, states and update are there, and gradients go there as soon as they exist.

Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload). On the device are the weights and the gradients of at most two blocks:
of the one going back, and of the one behind it, which are leaving.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from fitune.engine.host import Arrival, HostMemory
from fitune.engine.optimizers import WeightOptimizer, set_learning_rate
from fitune.values.plan import Optimizer


class HostOptimizer(WeightOptimizer):
    """torch's fused CPU optimizer over fp32 masters, fed block by block.

    In fp32 it does what DirectOptimizer does, else what MasterOptimizer does; gradients of several micro-batches are
    added up in fp32, in the host's own thread while backward goes on. The step waits for the norm of all.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizer: Optimizer,
        *,
        host: HostMemory,
        blocks: Sequence[Sequence[str]],
    ) -> None:
        """``blocks`` names the trained parameters of each decoder block."""
        self.host = host
        self.blocks = [list(names) for names in blocks]
        in_blocks = {name for names in self.blocks for name in names}
        self.around = [name for name in parameters if name not in in_blocks]
        with torch.no_grad(), host.working():
            masters = {
                name: Parameter(host.empty_like(p, dtype=torch.float32).copy_(p))
                for name, p in parameters.items()
            }
        super().__init__(parameters, masters, optimizer)
        self._rooms = {name: host.empty_like(master) for name, master in self.masters.items()}
        """Sums of gradients, kept from step to step."""
        self._summed: dict[str, Tensor] = {}
        """The sums that this step has added gradients to, by the parameter's name."""
        self._leaving: tuple[Sequence[Tensor], Arrival] | None = None
        self._under_way: list[Callable[[], None]] = []

    def goes_back(self, block: int) -> None:
        """Backward reaches ``block``: the gradients of the one behind it are complete and begin to leave."""
        self._carry(self.blocks[block + 1] if block + 1 < len(self.blocks) else self.around)

    def take_gradients(self, *, wait: bool) -> None:
        """The loss is through, or backward is: whatever there is begins to leave."""
        self._carry(self.parameters)
        if wait:
            self._let_go()

    def gradients(self) -> list[Tensor]:
        """Sums over the micro-batches, in fp32, on the host."""
        self.take_gradients(wait=True)
        self._wait_for_sums()
        return [self._summed[name] for name in self.parameters if name in self._summed]

    def drop_gradients(self) -> None:
        """Forget the sums, once the copies and additions under way are through."""
        self._let_go()
        self._wait_for_sums()
        self._summed.clear()

    def step(self, *, learning_rate: float, gradient_factor: float) -> None:
        """Block by block: while one is stepped, the new weights of the one before it go to the device."""
        self._wait_for_sums()
        set_learning_rate(self.torch_optimizer, learning_rate)
        sent: tuple[Sequence[Tensor], Arrival] | None = None
        for names in (*self.blocks, self.around):
            with self.host.working():
                for name in names:
                    if name in self._summed:
                        self.masters[name].grad = self._summed[name].mul_(gradient_factor)
                self.torch_optimizer.step()  # passes over what has no gradient
                for name in names:
                    self.masters[name].grad = None
                following = self._send_weights(names)
            if sent is not None:
                sent[1].block()  # its rooms are free again
            sent = following
        if sent is not None:
            sent[1].block()
        self._summed.clear()
        self._adopt_states()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from ``tensors``, on the host."""
        with self.host.working():
            super().restore(tensors)
        self._adopt_states()

    def _saved_master(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A state without masters is of an optimizer that stepped the weights themselves."""
        return tensors.get(f"master/{name}", self.parameters[name])

    def _carry(self, names: Iterable[str]) -> None:
        """Let go of the gradients copied before, and begin to copy those of ``names`` to the host and add them up."""
        self._let_go()
        names = [name for name in names if self.parameters[name].grad is not None]
        gradients = [gradient for name in names if (gradient := self.parameters[name].grad) is not None]
        rooms = [
            self._rooms[name] if name not in self._summed and gradient.dtype == torch.float32 else None
            for name, gradient in zip(names, gradients, strict=True)
        ]  # fp32 gradients of a first micro-batch are their sum
        copies, arrival = self.host.take(gradients, rooms)
        parts = [
            (self._rooms[name], copy, name in self._summed) for name, copy in zip(names, copies, strict=True)
        ]
        for name in names:
            self.parameters[name].grad = None
            self._summed[name] = self._rooms[name]
        self._leaving = gradients, arrival
        self._under_way.append(self.host.beside(partial(_add, parts, arrival)))

    def _send_weights(self, names: Iterable[str]) -> tuple[Sequence[Tensor], Arrival]:
        """New weights in their own type; what waits on the host itself is written there."""
        sources, targets = [], []
        for name in names:
            weight, master = self.parameters[name].data, self.masters[name].data
            if self.host.owns(weight):
                weight.copy_(master)
                continue
            if weight.dtype != master.dtype:
                master = self.host.empty_like(master, dtype=weight.dtype).copy_(master)
            sources.append(master)
            targets.append(weight)
        return sources, self.host.put(sources, targets)

    def _wait_for_sums(self) -> None:
        """Wait until all that was copied is added up."""
        under_way, self._under_way = self._under_way, []
        for wait in under_way:
            wait()

    def _let_go(self) -> None:
        """Free the gradients on the device as soon as their copies are through, which the device waits for."""
        if self._leaving is not None:
            self._leaving[1].wait()
            self._leaving = None

    def _adopt_states(self) -> None:
        for tensor in self.tensors().values():
            self.host.adopt(tensor)


def _add(parts: Sequence[tuple[Tensor, Tensor, bool]], arrival: Arrival) -> None:
    """Parts are sum, copied gradient, and True where the sum has something already."""
    arrival.block()
    for total, gradient, is_more in parts:
        if is_more:
            total.add_(gradient)
        elif gradient is not total:
            total.copy_(gradient)
