"""This rank's part, in DeepSpeed's memory, of every trained weight, its fp32 master and its optimizer states.

Stages 1 and 2 lay all weights of a group end to end and give each rank one stretch of that, which cuts weights where it
ends. Stage 3 gives each rank the same stretch of every weight. Both keep fp32 masters and states in flat tensors.

Checkpoints know rows and no stretches. So what is saved is gathered, a tensor at a time, and each rank keeps its rows
of it on the host.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from fitune.engine.kept_rows import divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``elements`` of a weight from ``start`` on, which are those of flat tensor ``group`` from ``offset`` on."""

    group: int
    offset: int
    start: int
    elements: int


class DeepSpeedShares(ABC):
    """Weights, masters and states by the names that checkpoints give them."""

    def __init__(self, trained: Mapping[str, Parameter], optimizer: Any) -> None:
        self.parameters = dict(trained)
        self.optimizer = optimizer
        """DeepSpeed's, around torch's."""
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.pieces = {name: self._piece(parameter) for name, parameter in self.parameters.items()}

    @abstractmethod
    def trained(self) -> dict[str, Tensor]: ...

    @torch.no_grad()
    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        """Give weights and their masters the values of ``weights``."""
        for group, names in self._groups().items():
            with self._in_memory(group, is_changed=True):
                for name in names:
                    self._put_weight(self.parameters[name], weights[name])
                    self._master(name).copy_(self._own(name, weights[name]))

    def states(self) -> dict[str, Tensor]:
        """``master/<weight>``, and ``<state>/<weight>`` once there are states; called by every rank."""
        found: dict[str, Tensor] = {}
        for group, names in self._groups().items():
            with self._in_memory(group):
                for name in names:
                    found |= self._states_of(name)
        return found

    def _states_of(self, name: str) -> dict[str, Tensor]:
        piece = self.pieces[name]
        found = {f"master/{name}": self._by_rows(name, self._master(name))}
        for key, value in self._state(piece.group).items():
            if isinstance(value, Tensor):
                flat = value.dim() > 0
                found[f"{key}/{name}"] = self._by_rows(name, _cut(value, piece)) if flat else value
        return found

    @torch.no_grad()
    def restore(self, states: Mapping[str, Tensor]) -> None:
        """A state without masters is of an optimizer that stepped the weights themselves."""
        of_group: dict[int, dict[str, Tensor]] = {}
        for key, whole in states.items():
            of_group.setdefault(self.pieces[key.partition("/")[2]].group, {})[key] = whole
        for group, own in of_group.items():
            with self._in_memory(group, is_changed=True):
                for key, whole in own.items():
                    self._restore(key, whole)

    def _restore(self, key: str, whole: Tensor) -> None:
        kind, _, name = key.partition("/")
        if kind == "master":
            self._master(name).copy_(self._own(name, whole))
            return
        state, flat = self._state(self.pieces[name].group), self._flats[self.pieces[name].group]
        if whole.dim() == 0:
            state[kind] = whole.to(flat.device).clone()
            return
        if kind not in state:
            state[kind] = torch.zeros_like(flat, dtype=whole.dtype, requires_grad=False)
        _cut(state[kind], self.pieces[name]).copy_(self._own(name, whole))

    def resident(self) -> list[Tensor]:
        """Flat tensors that stay between two steps."""
        states = [value for i in range(len(self._flats)) for value in self._state(i).values()]
        return [*self._flats, *(value for value in states if isinstance(value, Tensor))]

    @property
    @abstractmethod
    def _flats(self) -> list[Tensor]:
        """fp32 masters, one flat tensor for each group."""

    @abstractmethod
    def _piece(self, parameter: Parameter) -> Piece: ...

    @abstractmethod
    def _put_weight(self, parameter: Parameter, whole: Tensor) -> None: ...

    def _in_memory(self, group: int, *, is_changed: bool = False) -> AbstractContextManager[None]:
        """Inside, masters and states of flat tensor ``group`` are in memory; they always are, but on NVMe."""
        return nullcontext()

    def _groups(self) -> dict[int, list[str]]:
        """Names of the weights in each flat tensor."""
        found: dict[int, list[str]] = {}
        for name, piece in self.pieces.items():
            found.setdefault(piece.group, []).append(name)
        return found

    def _state(self, group: int) -> dict[str, Any]:
        return cast(dict[str, Any], self.optimizer.state[self._flats[group]])

    def _master(self, name: str) -> Tensor:
        return _cut(self._flats[self.pieces[name].group].detach(), self.pieces[name])

    def _own(self, name: str, whole: Tensor) -> Tensor:
        piece = self.pieces[name]
        return whole.flatten().narrow(0, piece.start, piece.elements)

    def _by_rows(self, name: str, stretch: Tensor) -> DTensor:
        """The tensor like weight ``name`` of which this rank has ``stretch``, divided by rows, on the host."""
        shape, piece = _shape(self.parameters[name]), self.pieces[name]
        whole = torch.zeros(math.prod(shape), dtype=stretch.dtype, device=stretch.device)
        whole.narrow(0, piece.start, piece.elements).copy_(stretch)
        dist.all_reduce(whole)  # every element is on one rank, and zero on the others
        rows = whole.view(shape).chunk(self.mesh.size())
        rank = self.mesh.get_local_rank()
        own = rows[rank] if rank < len(rows) else whole.view(shape)[:0]
        stride = torch.empty(shape, device="meta").stride()
        host = own.to("cpu", copy=True)
        return divided(host, self.mesh, [Shard(0)], shape=shape, stride=stride)


class FlatShares(DeepSpeedShares):
    """Stages 1 and 2: every rank has all weights, views of one flat tensor a group."""

    def trained(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    @property
    def _flats(self) -> list[Tensor]:
        return cast(list[Tensor], self.optimizer.single_partition_of_fp32_groups)

    def _piece(self, parameter: Parameter) -> Piece:
        mapping = cast(Any, parameter)._hp_mapping
        if mapping is None:  # all of it is in other ranks' stretches
            return Piece(group=self._group(parameter), offset=0, start=0, elements=0)
        own, of_weight = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(
            group=mapping.param_group_index, offset=own.start, start=of_weight.start, elements=own.numel
        )

    def _group(self, parameter: Parameter) -> int:
        groups = self.optimizer.bit16_groups
        return next(i for i, group in enumerate(groups) if any(p is parameter for p in group))

    def _put_weight(self, parameter: Parameter, whole: Tensor) -> None:
        parameter.data.copy_(whole)


class TensorShares(DeepSpeedShares):
    """Stage 3: every rank has the same stretch of each weight, padded where the weight ends."""

    def trained(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.parameters.items():
            with _share_in_memory(parameter) as share:
                found[name] = self._by_rows(name, share.narrow(0, 0, self.pieces[name].elements))
        return found

    def resident(self) -> list[Tensor]:
        """This rank's tensors between two steps, DeepSpeed's gradient shares and sum buffers among them."""
        buffers = [
            bucket.buffer for bucket in self.optimizer.ipg_buckets.values() if bucket.buffer is not None
        ]
        return [*super().resident(), self.optimizer.grad_partitions_flat_buffer, *buffers]

    @property
    def _flats(self) -> list[Tensor]:
        return cast(list[Tensor], self.optimizer.fp32_partitioned_groups_flat)

    @contextmanager
    def _in_memory(self, group: int, *, is_changed: bool = False) -> Iterator[None]:
        """Small shares are never written to NVMe: DeepSpeed's swapper does not know them."""
        swapper, flat = getattr(self.optimizer, "optimizer_swapper", None), self._flats[group]
        if swapper is None or not swapper.is_swappable_tensor(
            numel=self.optimizer.fp16_partitioned_groups_flat_numel[group]
        ):
            yield
            return
        swapper.swap_in_optimizer_state(flat)
        try:
            yield
        finally:
            if is_changed:
                swapper.swap_out_optimizer_state(flat)
            else:
                swapper.release_swap_buffers(flat)

    def _piece(self, parameter: Parameter) -> Piece:
        group, offset, elements = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
        weight = cast(Any, parameter)
        start = min(elements * dist.get_rank(weight.ds_process_group), weight.ds_numel)
        return Piece(group=group, offset=offset, start=start, elements=min(elements, weight.ds_numel - start))

    def _put_weight(self, parameter: Parameter, whole: Tensor) -> None:
        piece = self._piece(parameter)
        with _share_in_memory(parameter, is_changed=True) as share:
            share.narrow(0, 0, piece.elements).copy_(whole.flatten().narrow(0, piece.start, piece.elements))
        if parameter.shape == whole.shape:  # a small one, which stays whole
            parameter.data.copy_(whole)


@contextmanager
def _share_in_memory(parameter: Parameter, *, is_changed: bool = False) -> Iterator[Tensor]:
    """Yields this rank's share of a weight, which inside is read from NVMe where it waits there."""
    weight = cast(Any, parameter)
    share, swapper = weight.ds_tensor, weight.nvme_swapper
    if share.final_location != "nvme":
        yield share
        return
    swapper.swap_in([weight], async_op=False)
    try:
        yield share
    finally:
        if is_changed:
            swapper.swap_out_and_release([weight])
        else:
            swapper.remove_partition_and_release_buffers([weight])


def _cut(flat: Tensor, piece: Piece) -> Tensor:
    return flat.narrow(0, piece.offset, piece.elements)


def _shape(parameter: Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
