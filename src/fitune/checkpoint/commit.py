"""COMMIT: the last file of a checkpoint, naming every other file with its size and sha256.

A step folder without it was never finished; a folder whose files differ from it was damaged later.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.durable import Stored, hash_file
from fitune.checkpoint.paths import inside
from fitune.errors import CheckpointError
from fitune.spec.disk import read_text
from fitune.spec.serial import from_json
from fitune.units import format_bytes

COMMIT = "COMMIT"
STATE = "state.json"
FOLDER = "checkpoints"
"""Name of the folder inside a run directory that holds step-N, ``latest`` and ``best``."""

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    step: int
    eval_loss: float | None
    files: dict[str, Stored]


def step_folders(folder: Path) -> list[Path]:
    """Every step-N in ``folder``, finished or not, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def is_committed(path: Path) -> bool:
    return (path / COMMIT).is_file()


def read_commit(path: Path) -> Commit:
    """Raises CheckpointError when the checkpoint was never finished or its COMMIT cannot be read."""
    if not is_committed(path):
        raise CheckpointError(
            f"{path}: no {COMMIT}, so this checkpoint was never finished",
            hint="name an older step, or resume without a path to take the newest valid one",
        )
    try:
        return from_json(Commit, read_text(path / COMMIT, follow_links=False))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / COMMIT}: damaged: {error}", hint=_OLDER) from error


def verify(path: Path) -> Commit:
    """Compare every file with its COMMIT. Raises CheckpointError naming the first that differs."""
    commit = read_commit(path)
    for name, stored in commit.files.items():
        _verify_file(inside(path, name), stored)
    return commit


_OLDER = "resume without a path to take the newest valid checkpoint"


def _verify_file(file: Path, stored: Stored) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing", hint=_OLDER)
    size = file.stat().st_size
    if size != stored.bytes:  # before hashing: a truncated file of many GiB is found at once
        raise CheckpointError(
            f"{file}: {format_bytes(size)} ({size} bytes), saved with {stored.bytes} bytes", hint=_OLDER
        )
    try:
        found = hash_file(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}", hint=_OLDER) from error
    if found.sha256 != stored.sha256:
        raise CheckpointError(
            f"{file}: damaged, sha256 {found.sha256[:12]}… instead of {stored.sha256[:12]}…", hint=_OLDER
        )
