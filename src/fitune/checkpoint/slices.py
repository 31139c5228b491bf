"""Tensors that are divided over ranks, in a checkpoint: which rank writes which part, and where a part is found again.

Every rank writes the parts that it holds into files of its own, ``model-rank3.safetensors``; slices.json says which
rows (or columns) of which tensor are in which of them. What no rank divides is in ``model.safetensors``, whole, as in
the checkpoint of one process. torch.distributed.checkpoint is not used: its index of parts, ``.metadata``, is a
pickle, and reading a pickle runs whatever code is in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fitune.checkpoint.state import NAMES, Json, TrainState, require_not_empty, tensors_bytes
from fitune.errors import CheckpointError
from fitune.values.counts import rows_of_share
from fitune.values.serial import from_data, parse_object

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
    """File of a checkpoint that says where the parts of its divided tensors are."""

    groups: Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """All that one rank writes of a TrainState.

    The first rank writes what is whole on every rank; what is divided is written by each rank that holds a part, and by
    one of those that hold the same part.
    """

    step: int
    files: dict[str, dict[str, Tensor]]
    """Name of a file -> its tensors by name, parts as plain tensors."""
    slices: Groups
    """By group: where this rank's parts belong, each with its own entry alone."""
    facts: dict[str, Json]
    log: bytes

    @property
    def bytes(self) -> int:
        """Size of the files of tensors that it makes."""
        return sum(tensors_bytes(tensors) for tensors in self.files.values())


def share_of(state: TrainState, *, rank: int) -> Share:
    """The part of ``state`` that ``rank`` writes, on the tensors' own storage.

    Raises CheckpointError naming a tensor that is empty.
    """
    files: dict[str, dict[str, Tensor]] = {}
    slices: Groups = {}
    for group, tensors in state.tensors.items():
        if rank == 0:
            files[file_of(group)] = {}
        for name, tensor in tensors.items():
            require_not_empty(name, tensor)
            place = _place(tensor, rank)
            if place is None and rank == 0:
                files[file_of(group)][name] = _local(tensor)
            if place is not None and place.parts:
                files.setdefault(file_of(group, rank), {})[name] = _local(tensor)
                slices.setdefault(group, {})[name] = place
    return Share(step=state.step, files=files, slices=slices, facts=state.facts, log=state.log)


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
                before = found[name].parts if name in found else ()
                parts = sorted((*before, *divided.parts), key=lambda part: part[1])
                found[name] = replace(divided, parts=tuple(parts))
    for tensors in groups.values():
        for name, divided in tensors.items():
            _require_without_gap(name, divided)
    return Index(groups=groups)


def _require_without_gap(name: str, divided: Divided) -> None:
    size = divided.shape[divided.dim]
    edges = [0, *(stop for _, _, stop in divided.parts)]
    starts = [*(start for _, start, _ in divided.parts), size]
    if edges != starts:
        raise CheckpointError(
            f"tensor {name!r}: its parts {[part[1:] for part in divided.parts]} do not make up 0 to {size}"
        )


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


_DTYPES = {name: dtype for dtype, name in NAMES.items()}


class SavedTensors(Mapping[str, Tensor]):
    """One group of tensors in a checkpoint, by name.

    Files are opened when something in them is wanted, and stay open until ``close``: on the disk a removed checkpoint
    takes room as long as one of them is open.
    """

    def __init__(self, folder: Path, group: str, divided: Mapping[str, Divided]) -> None:
        """``divided``: the tensors that are in parts; all others are in the group's own file, if there is one."""
        self._folder, self._group, self._divided = folder, group, dict(divided)
        self._open: dict[Path, Any] = {}
        whole = folder / file_of(group)
        self._whole: list[str] = list(self._file(whole).keys()) if whole.is_file() else []

    def __getitem__(self, name: str) -> Tensor:
        divided = self._divided.get(name)
        if divided is not None:
            return self.part(name, divided.dim, 0, divided.shape[divided.dim])
        if name not in self._whole:
            raise KeyError(name)
        return self._read(None, name)

    def __contains__(self, name: object) -> bool:
        return name in self._divided or name in self._whole

    def __iter__(self) -> Iterator[str]:
        return iter([*self._whole, *self._divided])

    def __len__(self) -> int:
        return len(self._whole) + len(self._divided)

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor; nothing is read."""
        if name in self._divided:
            return torch.Size(self._divided[name].shape)
        if name not in self._whole:
            raise KeyError(name)
        return torch.Size(self._file(self._folder / file_of(self._group)).get_slice(name).get_shape())

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` along ``dim``, from the files that hold them; the others are not opened."""
        divided = self._divided.get(name)
        if divided is None:
            return self._read(None, name, {dim: (start, stop)})
        shape = list(divided.shape)
        shape[dim] = stop - start
        found = torch.empty(shape, dtype=_DTYPES[divided.dtype])
        for rank, first, behind in divided.parts:
            if dim != divided.dim:
                rows = self._read(rank, name, {dim: (start, stop)})
                found.narrow(divided.dim, first, behind - first).copy_(rows)
            elif first < stop and start < behind:
                low, high = max(first, start), min(behind, stop)
                rows = self._read(rank, name, {dim: (low - first, high - first)})
                found.narrow(dim, low - start, high - low).copy_(rows)
        return found

    def close(self) -> None:
        """Lets go of the open files; a later read opens them again."""
        self._open.clear()

    def _read(
        self, rank: int | None, name: str, wanted: Mapping[int, tuple[int, int]] | None = None
    ) -> Tensor:
        file = self._folder / file_of(self._group, rank)
        opened = self._file(file)
        try:
            if not wanted:
                return opened.get_tensor(name)
            lazy = opened.get_slice(name)
            index = tuple(slice(*wanted.get(dim, (None, None))) for dim in range(len(lazy.get_shape())))
            return lazy[index]
        except (OSError, SafetensorError) as error:
            raise _unreadable(file, error) from error

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise _unreadable(file, error) from error
        return self._open[file]


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read as safetensors: {error}")
