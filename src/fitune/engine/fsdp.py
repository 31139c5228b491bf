"""FSDP2: every rank holds a share of each tensor, and a block is whole only around its work.

Rajbhandari et al. 2020 (arXiv 1910.02054) by torch.distributed.fsdp.fully_shard. Decoder blocks are groups of their
own; embedding, final norm and head are the root's group, whole from the start of forward to the end of backward. So
the head can run in chunks, outside of any module's forward.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from fitune.engine.fused_rules import Division, rule_for
from fitune.engine.gradient_scale import global_norm
from fitune.engine.host import HostMemory
from fitune.engine.host_optimizer import HostOptimizer
from fitune.engine.in_backward import InBackwardEngine, Norm
from fitune.engine.kept_rows import KeptRows, divided, divided_dimension
from fitune.engine.plain import PlainEngine
from fitune.engine.protocol import (
    Engine,
    EngineState,
    EnterPhase,
    InParts,
    Lazy,
    LossModel,
    Update,
    shape_of,
)
from fitune.values.counts import rows_of_share
from fitune.values.machines.hardware import Hardware
from fitune.values.plan import ClipByNorm, ClipByValue, Plan, Precision, Zero


class Trunk(nn.Module):
    """Calls the body, as the module whose forward gathers the root's group."""

    def __init__(self, whole: nn.Module, body: nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self._body = (body,)  # a part of ``whole``, not to be registered twice

    def forward(self, **inputs: Any) -> Any:
        """The body's own output for ``inputs``."""
        return self._body[0](**inputs)


def mesh_of(sharding: Zero, hardware: Hardware, *, device: str) -> DeviceMesh:
    """All ranks in one row, or nodes × devices when shares are repeated on every node."""
    if not sharding.hybrid:
        return init_device_mesh(device, (hardware.num_gpus,))
    shape = (hardware.nodes, hardware.gpus_per_node)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def shard(
    whole: nn.Module, body: nn.Module, blocks: Iterable[nn.Module], *, sharding: Zero, mesh: DeviceMesh,
    precision: Precision, rows: KeptRows | None = None, host: HostMemory | None = None,
) -> Trunk:  # fmt: skip
    """Divide every parameter of ``whole`` over ``mesh``; what is returned takes the place of ``body``.

    Parameters are in the compute type already. Gradients are summed in fp32 where the optimizer has fp32 masters.
    At stage 3 a block lets its weights go after its forward; the root never does before backward is through.
    ``rows``: this rank's of what has only stand-ins in ``whole``. ``host``: shares wait in its rooms, pinned beside a
    GPU; a group passes through the device to be gathered, and its summed gradients go to the host at once.
    Raises NoPinnedMemory.
    """
    if host is not None and rows is None:
        rows = KeptRows(mesh, on_host=True)
    trunk = Trunk(whole, body)
    policy = MixedPrecisionPolicy(
        reduce_dtype=torch.float32 if precision.has_master else None, cast_forward_inputs=False
    )
    common: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if host is not None
        else OffloadPolicy(),
        "shard_placement_fn": divided_dimension(mesh.size(mesh.ndim - 1)),
    }
    for group in (*blocks, trunk):
        with nullcontext() if rows is None else rows.put_into(group, host=host):
            fully_shard(group, reshard_after_forward=sharding.stage == 3 and group is not trunk, **common)
    for module in _groups(trunk):
        # the loss is divided by the tokens of all ranks, so gradients are added up and not averaged
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return trunk


def _groups(trunk: nn.Module) -> Iterator[FSDPModule]:
    for module in trunk.modules():
        if isinstance(module, FSDPModule):
            yield module


class OnShares(Engine):
    """Saves, restores and releases weights and states that are divided over ranks.

    It stands before the class that steps a rank's shares as plain tensors.
    """

    def _divide(self, trunk: Trunk, sharded: Mapping[str, Parameter], mesh: DeviceMesh) -> None:
        self.trunk = trunk
        self.sharded = dict(sharded)
        self.local = {name: Parameter(local_shard(p)) for name, p in self.sharded.items()}
        """This rank's shares as plain tensors."""
        self.group = mesh.get_group(mesh.ndim - 1)

    def follow(self, name: str) -> Parameter:
        """The share of ``name``, on the storage that FSDP2 keeps it in now: its first forward may pad it."""
        local = self.local[name]
        local.data = local_shard(self.sharded[name])
        return local

    def rest(self) -> None:
        """Forget every weight that was gathered: each rank has its shares again."""
        for module in _groups(self.trunk):
            module.reshard()

    def trained(self) -> dict[str, Tensor]:
        """The weights as they are divided."""
        return {name: parameter.detach() for name, parameter in self.sharded.items()}

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Give the shares the values of ``weights``."""
        for name, parameter in self.sharded.items():
            local_shard(parameter).copy_(self._own(name, weights))

    def state(self) -> EngineState:
        """States that are divided as their weight is are DTensors; the others are the same on every rank."""
        state = super().state()
        return replace(
            state, tensors={key: self._as_divided(key, value) for key, value in state.tensors.items()}
        )

    def restore(self, state: EngineState) -> None:
        """Take this rank's part of ``state``; what is no tensor of a weight's shape is whole."""
        whole = state.tensors
        super().restore(replace(state, tensors=Lazy(whole, lambda key: self._own(key, whole))))

    def divisions(self) -> dict[str, Division]:
        """Division of each weight by name."""
        return {
            name: Division(shape=weight.shape, dim=_layout(name, weight)[1], group=self.group)
            for name, weight in self.sharded.items()
            if isinstance(weight, DTensor)
        }

    def _as_divided(self, key: str, local: Tensor) -> Tensor:
        weight = self._weight(key)
        if not isinstance(weight, DTensor):
            return local
        shape, dim = _layout(key, weight)
        is_factor = len(shape) < weight.ndim
        if dim is None or not (is_factor or local.shape == local_shard(weight).shape):
            return local
        placements = [Shard(dim) if isinstance(place, Shard) else place for place in weight.placements]
        stride = torch.empty(shape, device="meta").stride()
        return divided(local, weight.device_mesh, placements, shape=shape, stride=stride)

    def _own(self, key: str, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = self._weight(key)
        if not isinstance(weight, DTensor):
            return tensors[key]
        shape, dim = _layout(key, weight)
        if dim is None or shape_of(tensors, key) != shape:
            return tensors[key]
        mesh = weight.device_mesh
        axis = mesh.ndim - 1  # shares are repeated along the other one
        start, stop = rows_of_share(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        if isinstance(tensors, InParts):
            return tensors.part(key, dim, start, stop)
        return tensors[key].narrow(dim, start, stop - start)

    def _weight(self, key: str) -> Parameter:
        """``exp_avg/<weight>`` or the name itself."""
        return self.sharded[key.partition("/")[2] or key]


_MEAN_OVER = {"row": -1, "column": -2}
"""The dimension of its weight that a factor of AdaLomo is a mean over, and lacks (engine/fused_rules.py)."""


def _layout(key: str, weight: DTensor) -> tuple[torch.Size, int | None]:
    """Whole shape of a weight, or of a state of it, and the dimension that is divided.

    A factor lacks the dimension that it is a mean over, and is whole where that is the divided one.
    """
    [dim] = [place.dim for place in weight.placements if isinstance(place, Shard)]
    kind, is_state, _ = key.partition("/")
    if not is_state or kind not in _MEAN_OVER:
        return weight.shape, dim
    gone = _MEAN_OVER[kind] % weight.ndim
    shape = torch.Size(size for place, size in enumerate(weight.shape) if place != gone)
    return shape, None if dim == gone else dim - (dim > gone)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's share, as an ordinary tensor on the same storage."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


class ShardedEngine(OnShares, PlainEngine):
    """The ordinary engine on this rank's shares.

    The optimizer steps plain tensors, so that any kernel will do; only the norm of the gradients needs the others.
    """

    def __init__(
        self,
        model: LossModel,
        sharded: Mapping[str, Parameter],
        *,
        trunk: Trunk,
        mesh: DeviceMesh,
        plan: Plan,
        host: HostMemory | None = None,
    ) -> None:
        """With ``host`` the shares are there already, and the optimizer too."""
        self._divide(trunk, sharded, mesh)
        self.accumulates_whole = isinstance(plan.sharding, Zero) and plan.sharding.stage == 1
        """Gradients are added up on whole weights, and divided at the end of a step."""
        super().__init__(
            model,
            self.local,
            optimizer=plan.optimizer,
            precision=plan.precision,
            max_grad_norm=plan.schedule.max_grad_norm,
            host=host,
        )

    def forward_backward(
        self, batch: Any, *, divisor: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """Stage 1 adds up whole gradients on whole weights, and divides both with the last micro-batch of a step."""
        if self.accumulates_whole and isinstance(self.trunk, FSDPModule):
            self.trunk.set_requires_gradient_sync(last)
            self.trunk.set_reshard_after_backward(last)
        loss = super().forward_backward(batch, divisor=divisor, enter_phase=enter_phase)
        if isinstance(self.optimizer, HostOptimizer):
            # a gradient that stays would make FSDP2 copy the next micro-batch's to the host one by one, and wait
            self._take_from_shards()
            self.optimizer.take_gradients(wait=True)
        return loss

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """Steps this rank's shares by their gradients, which FSDP2 leaves on its own parameters."""
        self._take_from_shards()
        return super().update(learning_rate=learning_rate, enter_phase=enter_phase)

    def _take_from_shards(self) -> None:
        for name, parameter in self.sharded.items():
            local = self.follow(name)
            if parameter.grad is not None:
                local.grad, parameter.grad = local_shard(parameter.grad), None

    def gradient_norm(self) -> Tensor:
        """Norm over the shares of all ranks, with the loss scale: every rank gets the same one."""
        squared = global_norm(self.optimizer.gradients()).square()
        dist.all_reduce(squared, group=self.group)
        return squared.sqrt()


class ShardedInBackwardEngine(OnShares, InBackwardEngine):
    """Each rank updates its share of a weight inside backward, as soon as the sum of all ranks' gradients is there.

    FSDP2 sums the gradients of a block when backward is through with it, leaves this rank's share of each on its
    sharded parameter, and calls the parameter's hook: there the rule uses it. So one block's shares are alive at a
    time, and whole gradients of one block while they are summed. The root's group (embedding, final norm, head) is
    summed last. Norms are those of all ranks.
    """

    def __init__(
        self,
        model: LossModel,
        sharded: Mapping[str, Parameter],
        *,
        trunk: Trunk,
        mesh: DeviceMesh,
        plan: Plan,
        clip: ClipByValue | ClipByNorm,
    ) -> None:
        self._divide(trunk, sharded, mesh)
        rule = rule_for(
            self.local,
            tuning=plan.tuning,
            optimizer=plan.optimizer,
            precision=plan.precision,
            divisions=self.divisions(),
        )
        super().__init__(model, sharded, rule=rule, clip=clip, precision=plan.precision)

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """After a skipped step the weights that are still gathered are released."""
        update = super().update(learning_rate=learning_rate, enter_phase=enter_phase)
        if update.skipped:  # then no backward let go of what the first one kept gathered
            self.rest()
        return update

    def _measure(self, enter_phase: EnterPhase) -> float:
        """Head and embedding stay gathered after the first backward: the loss runs again before the second."""
        assert isinstance(self.trunk, FSDPModule)
        self.trunk.set_reshard_after_backward(False, recurse=False)
        try:
            return super()._measure(enter_phase)
        finally:
            self.trunk.set_reshard_after_backward(True, recurse=False)

    def _taken(self, name: str, gradient: Tensor) -> Tensor:
        self.follow(name)
        return local_shard(gradient)

    def _loss_left_gradients(self) -> bool:
        """True if the loss left gradients: they are on the whole weights that FSDP2 gathered."""
        return any(parameter.grad is not None for parameter in self.trunk.parameters())

    def _total(self, measured: Norm) -> float:
        """One norm for all ranks: so they clip alike, and skip a step or stop together."""
        if measured.square is not None:
            dist.all_reduce(measured.square, group=self.group)
        return super()._total(measured)
