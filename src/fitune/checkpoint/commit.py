"""COMMIT: the manifest of a checkpoint, naming every other file with its size and sha256, and itself by its digest.

A folder whose files differ from it was damaged.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.durable import Stored, hash_file
from fitune.checkpoint.line import Line, Parent
from fitune.checkpoint.paths import inside
from fitune.checkpoint.sealed import read_sealed
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.units import format_bytes

COMMIT = "COMMIT"
STATE = "state.json"
LOG = "metrics.jsonl"
FOLDER = "checkpoints"
"""Name of the folder inside a run directory that holds step-N, ``LINE``, ``latest`` and ``best``."""

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    step: int
    line: Line
    """The attempts that led here; the last one saved it."""
    parent: Parent | None
    """None for the first one of a run that began at the beginning."""
    eval_loss: float | None
    files: dict[str, Stored]
    digest: str = ""
    """sha256 of all of the above."""


def step_folders(folder: Path) -> list[Path]:
    """Every step-N in ``folder``, whole or not, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def is_committed(path: Path) -> bool:
    return (path / COMMIT).is_file()


def read_commit(path: Path) -> Commit:
    """Raises CheckpointError when COMMIT is missing or changed, or the folder has the name of another step."""
    if not is_committed(path):
        raise CheckpointError(f"{path}: no {COMMIT}, so this is no whole checkpoint", hint=_OLDER)
    try:
        commit = read_sealed(Commit, path / COMMIT)
    except OSError as error:
        raise CheckpointError(
            f"{path / COMMIT}: cannot be read: {error.strerror or error}", hint=_OLDER
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path / COMMIT}: damaged: {error}", hint=_OLDER) from error
    named = _STEP.fullmatch(path.name)
    if named and int(named[1]) != commit.step:
        raise CheckpointError(f"{path}: holds step {commit.step}, not that of its name", hint=_OLDER)
    return commit


def verify(path: Path) -> Commit:
    """Compare every file with COMMIT, by its hash. Raises CheckpointError naming the first that differs."""
    commit = read_commit(path)
    seen = _signature(path, commit.files)
    for name, stored in commit.files.items():
        _require_size(_inside(path, name), stored)
    for name, stored in commit.files.items():
        _require_hash(path / name, stored)
    _known[path.resolve()] = seen
    return commit


def verify_unless_known(path: Path) -> Commit:
    """As ``verify``, but the hashing is left out when this process wrote or hashed the files and the system says
    that none of them was touched since."""
    commit = read_commit(path)
    seen = _signature(path, commit.files)
    if seen and _known.get(path.resolve()) == seen:
        return commit
    return verify(path)


def note_as_known(path: Path, files: Iterable[str]) -> None:
    """Files that this process wrote or hashed and that did not change since: they need no hashing."""
    _known[path.resolve()] = _signature(path, files)


_Signature = tuple[tuple[str, int, int, int, int], ...]

_known: dict[Path, _Signature] = {}
"""Checkpoints that this process wrote or hashed, with what the system said of their files."""


def _signature(path: Path, files: Iterable[str]) -> _Signature:
    """Size, times and inode of every file; empty where one is missing."""
    try:
        found = [(name, os.lstat(path / name)) for name in sorted({COMMIT, *files})]
    except (OSError, ValueError):
        return ()
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in found)


_OLDER = "resume without a path to take the newest valid checkpoint"


def _inside(path: Path, name: str) -> Path:
    try:
        return inside(path, name)
    except RunDirectoryError as error:
        raise CheckpointError(f"{path / COMMIT}: {error.message}", hint=_OLDER) from error


def _require_size(file: Path, stored: Stored) -> None:
    """Before hashing: a truncated file of many GiB is found at once."""
    if not file.is_file():
        raise CheckpointError(f"{file}: missing", hint=_OLDER)
    size = file.stat().st_size
    if size != stored.bytes:
        raise CheckpointError(
            f"{file}: {format_bytes(size)} ({size} bytes), saved with {stored.bytes} bytes", hint=_OLDER
        )


def _require_hash(file: Path, stored: Stored) -> None:
    try:
        found = hash_file(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}", hint=_OLDER) from error
    if found != stored:
        raise CheckpointError(
            f"{file}: damaged, sha256 {found.sha256[:12]}… instead of {stored.sha256[:12]}…", hint=_OLDER
        )
