"""The trained weights as FSDP2 divides them: this rank's shares as plain tensors, and whole ones for checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Parameter

from fitune.engine.fused_rules import Division
from fitune.engine.kept_rows import divided
from fitune.engine.protocol import InParts, shape_of
from fitune.spec.counts import rows_of_share

_MEAN_OVER = {"row": -1, "column": -2}
"""The dimension of its weight that a factor of AdaLomo is a mean over, and lacks (engine/fused_rules.py)."""


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's share, as an ordinary tensor on the same storage."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


class Shares:
    """This rank's share of every trained weight, and its optimizer states by the names that checkpoints give them."""

    def __init__(self, sharded: Mapping[str, Parameter]) -> None:
        self.sharded = dict(sharded)
        self.local = {name: Parameter(local_shard(p)) for name, p in self.sharded.items()}

    def follow(self, name: str) -> Parameter:
        """The share of ``name``, on the storage that FSDP2 keeps it in now: its first forward may pad it."""
        local = self.local[name]
        local.data = local_shard(self.sharded[name])
        return local

    def trained(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.sharded.items()}

    def put_back(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.sharded.items():
            local_shard(parameter).copy_(self._own(name, weights))

    def as_divided(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``states`` of the shares: those that are divided as their weight is are DTensors."""
        return {key: self._as_divided(key, state) for key, state in states.items()}

    def own(self, states: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's shares of ``states``, whole tensors, one read at a time; those that are no tensors of a weight's
        shape are whole."""
        return _Own(states, self._own)

    def divisions(self) -> dict[str, Division]:
        """Division of each weight by name; weights that every rank has whole are left out."""
        found = {}
        for name, weight in self.sharded.items():
            if isinstance(weight, DTensor):
                mesh = weight.device_mesh
                [dim] = [p.dim for p in weight.placements if isinstance(p, Shard)]
                found[name] = Division(shape=weight.shape, dim=dim, group=mesh.get_group(mesh.ndim - 1))
        return found

    def _as_divided(self, key: str, local: Tensor) -> Tensor:
        weight = self._weight(key)
        if not isinstance(weight, DTensor):
            return local
        layout = _layout(key, weight)
        if not layout.is_divided or not (_is_factor(key) or local.shape == local_shard(weight).shape):
            return local
        stride = torch.empty(layout.shape, device="meta").stride()
        return divided(local, weight.device_mesh, layout.placements, shape=layout.shape, stride=stride)

    def _own(self, key: str, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = self._weight(key)
        if not isinstance(weight, DTensor):
            return tensors[key]
        layout = _layout(key, weight)
        if not layout.is_divided or shape_of(tensors, key) != layout.shape:
            return tensors[key]
        [(axis, dim)] = [(axis, p.dim) for axis, p in enumerate(layout.placements) if isinstance(p, Shard)]
        mesh = weight.device_mesh
        start, stop = rows_of_share(layout.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        if isinstance(tensors, InParts):
            return tensors.part(key, dim, start, stop)
        return tensors[key].narrow(dim, start, stop - start)

    def _weight(self, key: str) -> Parameter:
        """``exp_avg/<weight>`` or the name itself."""
        return self.sharded[key.partition("/")[2] or key]


class _Own(Mapping[str, Tensor]):
    """The shares of one rank, each cut when it is asked for."""

    def __init__(
        self, tensors: Mapping[str, Tensor], cut: Callable[[str, Mapping[str, Tensor]], Tensor]
    ) -> None:
        self._tensors, self._cut = tensors, cut

    def __getitem__(self, key: str) -> Tensor:
        return self._cut(key, self._tensors)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Whole shape of a tensor, and how it lies on the mesh of its weight."""

    shape: torch.Size
    placements: tuple[Placement, ...]

    @property
    def is_divided(self) -> bool:
        return any(isinstance(placement, Shard) for placement in self.placements)


def _layout(key: str, weight: DTensor) -> _Layout:
    """Returns the weight's own layout, without the dimension that a factor is a mean over."""
    if not _is_factor(key):
        return _Layout(weight.shape, tuple(weight.placements))
    gone = _MEAN_OVER[key.partition("/")[0]] % weight.ndim
    shape = torch.Size(size for dim, size in enumerate(weight.shape) if dim != gone)
    return _Layout(shape, tuple(_without(placement, gone) for placement in weight.placements))


def _without(placement: Placement, gone: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    if placement.dim == gone:
        return Replicate()
    return Shard(placement.dim - (placement.dim > gone))


def _is_factor(key: str) -> bool:
    return key.partition("/")[0] in _MEAN_OVER and "/" in key
