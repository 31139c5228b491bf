"""Each rank updates its share of a weight inside backward, as soon as the sum of all ranks' gradients is there.

FSDP2 sums the gradients of a block when backward is through with it, leaves this rank's share of each on its sharded
parameter, and calls the parameter's hook: there the rule uses it. So one block's shares are alive at a time, and whole
gradients of one block while they are summed. The root's group (embedding, final norm, head) is summed last.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from fitune.engine.fsdp import Trunk, let_go
from fitune.engine.fused_rules import rule_for
from fitune.engine.in_backward import InBackwardEngine, Norm
from fitune.engine.protocol import EngineState, EnterPhase, LossModel, Update
from fitune.engine.shares import Shares, local_shard
from fitune.spec.plan import ClipByNorm, ClipByValue, Optimizer, Precision, Tuning


class ShardedInBackwardEngine(InBackwardEngine):
    """Updates in backward on this rank's shares, plain tensors; norms are those of all ranks."""

    def __init__(
        self,
        model: LossModel,
        sharded: Mapping[str, Parameter],
        *,
        trunk: Trunk,
        mesh: DeviceMesh,
        tuning: Tuning,
        clip: ClipByValue | ClipByNorm,
        optimizer: Optimizer,
        precision: Precision,
    ) -> None:
        self.trunk = trunk
        self.shares = Shares(sharded)
        self.group = mesh.get_group(mesh.ndim - 1)
        rule = rule_for(
            self.shares.local,
            tuning=tuning,
            optimizer=optimizer,
            precision=precision,
            divisions=self.shares.divisions(),
        )
        super().__init__(model, sharded, rule=rule, clip=clip, precision=precision)

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        update = super().update(learning_rate=learning_rate, enter_phase=enter_phase)
        if update.skipped:  # then no backward let go of what the first one kept gathered
            self.rest()
        return update

    def rest(self) -> None:
        let_go(self.trunk)

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        self.shares.put_back(weights)

    def state(self) -> EngineState:
        """States that are divided as their weight is are DTensors; the others are the same on every rank."""
        state = super().state()
        return replace(state, tensors=self.shares.as_divided(state.tensors))

    def restore(self, state: EngineState) -> None:
        super().restore(replace(state, tensors=self.shares.own(state.tensors)))

    def _measure(self, enter_phase: EnterPhase) -> float:
        """Head and embedding stay gathered after the first backward: the loss runs again before the second."""
        assert isinstance(self.trunk, FSDPModule)
        self.trunk.set_reshard_after_backward(False, recurse=False)
        try:
            return super()._measure(enter_phase)
        finally:
            self.trunk.set_reshard_after_backward(True, recurse=False)

    def _taken(self, name: str, gradient: Tensor) -> Tensor:
        self.shares.follow(name)
        return local_shard(gradient)

    def _loss_left_gradients(self) -> bool:
        """True if the loss left gradients: they are on the whole weights that FSDP2 gathered."""
        return any(parameter.grad is not None for parameter in self.trunk.parameters())

    def _total(self, measured: Norm) -> float:
        """One norm for all ranks: so they clip alike, and skip a step or stop together."""
        if measured.square is not None:
            dist.all_reduce(measured.square, group=self.group)
        return super()._total(measured)
