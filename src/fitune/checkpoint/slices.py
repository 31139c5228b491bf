"""Tensors that are divided over ranks, in a checkpoint: which rank writes which part, and where a part is found again.

Every rank writes the parts that it holds into files of its own, ``model-rank3.safetensors``; slices.json says which
rows (or columns) of which tensor are in which of them. What no rank divides is in ``model.safetensors``, whole, as in
the checkpoint of one process. torch.distributed.checkpoint is not used: its index of parts, ``.metadata``, is a
pickle, and reading a pickle runs whatever code is in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fitune.checkpoint.state import NAMES, Json, TrainState, require_not_empty, tensors_bytes
from fitune.errors import CheckpointError
from fitune.spec.counts import rows_of_share
from fitune.spec.serial import from_data, parse_object, to_data

INDEX = "slices.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """A tensor of which several ranks hold parts."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """Name of the type in safetensors."""
    dim: int
    """The dimension that is divided."""
    parts: tuple[tuple[int, int, int], ...]
    """Rank, first row and the row behind the last, along ``dim``; in order and without a gap."""


Groups = dict[str, dict[str, Divided]]
"""Group of tensors ("model", "optimizer") -> name of a tensor -> where its parts are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    groups: Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """All that one rank writes of a TrainState.

    The first rank writes what is whole on every rank; what is divided is written by each rank that holds a part, and by
    one of those that hold the same part.
    """

    step: int
    whole: dict[str, dict[str, Tensor]]
    """By group; empty on every rank but the first."""
    parts: dict[str, dict[str, Tensor]]
    """By group: this rank's parts, as plain tensors."""
    slices: Groups
    """By group: where ``parts`` belong, each with its own entry alone."""
    facts: dict[str, Json]
    log: bytes

    @property
    def tensors(self) -> list[dict[str, Tensor]]:
        return [*self.whole.values(), *self.parts.values()]

    @property
    def bytes(self) -> int:
        """Size of the files of tensors that it makes."""
        return sum(tensors_bytes(tensors) for tensors in self.tensors)


def share_of(state: TrainState, *, rank: int) -> Share:
    """The part of ``state`` that ``rank`` writes, on the tensors' own storage.

    Raises CheckpointError naming a tensor that is empty.
    """
    whole: dict[str, dict[str, Tensor]] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    slices: Groups = {}
    for group, tensors in state.tensors.items():
        if rank == 0:
            whole[group] = {}
        for name, tensor in tensors.items():
            require_not_empty(name, tensor)
            place = _place(tensor, rank)
            if place is None and rank == 0:
                whole[group][name] = _local(tensor)
            if place is not None and place.parts:
                parts.setdefault(group, {})[name] = _local(tensor)
                slices.setdefault(group, {})[name] = place
    return Share(step=state.step, whole=whole, parts=parts, slices=slices, facts=state.facts, log=state.log)


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _place(tensor: Tensor, rank: int) -> Divided | None:
    """The place of this rank's part of ``tensor``, without a part when it writes none; None for a whole tensor."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    divided = [(axis, p.dim) for axis, p in enumerate(tensor.placements) if isinstance(p, Shard)]
    if not divided:
        return None
    [(axis, dim)] = divided
    start, stop = rows_of_share(tensor.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
    if _local(tensor).shape[dim] != stop - start:
        raise CheckpointError(
            f"rank {rank} holds {_local(tensor).shape[dim]} rows of a tensor of {tensor.shape[dim]}, not {stop - start}"
        )
    is_copy = any(mesh.get_local_rank(other) for other in range(mesh.ndim) if other != axis)
    has_part = stop > start and not is_copy
    return Divided(
        shape=tuple(tensor.shape),
        dtype=NAMES[tensor.dtype],
        dim=dim,
        parts=((rank, start, stop),) if has_part else (),
    )


def joined(slices: Sequence[Groups]) -> Index:
    """The parts of all ranks in one index. Raises CheckpointError naming a tensor of which a part is missing."""
    groups: Groups = {}
    for one in slices:
        for group, tensors in one.items():
            found = groups.setdefault(group, {})
            for name, divided in tensors.items():
                found[name] = _with(found.get(name), divided)
    for tensors in groups.values():
        for name, divided in tensors.items():
            _require_without_gap(name, divided)
    return Index(groups=groups)


def _with(found: Divided | None, more: Divided) -> Divided:
    parts = (*(found.parts if found is not None else ()), *more.parts)
    in_order = tuple(sorted(parts, key=lambda part: part[1]))
    return Divided(shape=more.shape, dtype=more.dtype, dim=more.dim, parts=in_order)


def _require_without_gap(name: str, divided: Divided) -> None:
    size = divided.shape[divided.dim]
    edges = [0, *(stop for _, _, stop in divided.parts)]
    starts = [*(start for _, start, _ in divided.parts), size]
    if edges != starts:
        raise CheckpointError(
            f"tensor {name!r}: its parts {[part[1:] for part in divided.parts]} do not make up 0 to {size}"
        )


def index_bytes(index: Index) -> bytes:
    return json.dumps(to_data(index), separators=(",", ":")).encode()


def read_index(content: bytes) -> Groups:
    """Raises ValueError saying what is wrong."""
    groups = from_data(Index, parse_object(content)).groups
    for tensors in groups.values():
        for name, divided in tensors.items():
            if not 0 <= divided.dim < len(divided.shape):
                raise ValueError(f"{name}: dimension {divided.dim} of a shape {divided.shape}")
            try:
                _require_without_gap(name, divided)
            except CheckpointError as error:
                raise ValueError(error.message) from None
    return groups


def file_of(group: str, rank: int | None = None) -> str:
    """Name of the file with the tensors of ``group``: the whole ones, or the parts that ``rank`` wrote."""
    return f"{group}.safetensors" if rank is None else f"{group}-rank{rank}.safetensors"


def groups_in(files: Mapping[str, object], divided: Groups) -> list[str]:
    """The groups whose whole tensors, or parts of tensors, are in ``files``."""
    of_ranks = {
        file_of(group, rank)
        for group, tensors in divided.items()
        for one in tensors.values()
        for rank, _, _ in one.parts
    }
    whole = [
        name.removesuffix(".safetensors")
        for name in files
        if name.endswith(".safetensors") and name not in of_ranks
    ]
    return list(dict.fromkeys([*whole, *divided]))
