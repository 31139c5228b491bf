"""Tensors of a checkpoint, each read when it is asked for: whole, or only the rows that one rank needs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fitune.checkpoint.slices import Divided, file_of
from fitune.checkpoint.state import NAMES
from fitune.errors import CheckpointError

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
        self._open.clear()

    def _read(
        self, rank: int | None, name: str, wanted: Mapping[int, tuple[int, int]] | None = None
    ) -> Tensor:
        file = self._folder / file_of(self._group, rank)
        opened = self._file(file)
        try:
            if not wanted:
                whole: Tensor = opened.get_tensor(name)
                return whole
            lazy = opened.get_slice(name)
            index = tuple(slice(*wanted.get(dim, (None, None))) for dim in range(len(lazy.get_shape())))
            part: Tensor = lazy[index]
            return part
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
