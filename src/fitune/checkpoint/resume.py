"""Find, check and read a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fitune.checkpoint.commit import FOLDER, STATE, is_committed, read_commit, step_folders, verify
from fitune.checkpoint.state import Json, TrainState
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.spec.strict_json import read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest valid checkpoint, None when there is none, and a warning for each newer one that is damaged."""

    path: Path | None
    warnings: tuple[str, ...] = ()


def newest_checkpoint(root: Path) -> Found:
    """The newest valid one in ``root/checkpoints``; every file of it was hashed. Unfinished ones do not count."""
    warnings: list[str] = []
    for path in reversed(step_folders(root / FOLDER)):
        if not is_committed(path):
            continue
        try:
            verify(path)
        except (CheckpointError, RunDirectoryError) as error:
            warnings.append(f"{path.name} is skipped: {error.message}")
            continue
        return Found(path=path, warnings=tuple(warnings))
    return Found(path=None, warnings=tuple(warnings))


def load_checkpoint(path: Path, *, verified: bool = False) -> TrainState:
    """Read ``path``, tensors on the host. ``verified`` saves the hashing that ``newest_checkpoint`` just did.

    Raises CheckpointError naming the file that is missing, truncated or changed.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such checkpoint", hint="resume: true takes the newest one of output_dir"
        )
    if (path / FOLDER).is_dir():
        found = newest_checkpoint(path).path
        raise CheckpointError(
            f"{path} is the directory of a run, not a checkpoint",
            hint=f"resume: {found}" if found else "it holds no checkpoint; start a new run",
        )
    commit = read_commit(path) if verified else verify(path)
    groups = [name for name in commit.files if name.endswith(".safetensors")]
    return TrainState(
        step=commit.step,
        tensors={name.removesuffix(".safetensors"): _read_tensors(path / name) for name in groups},
        facts=_read_facts(path / STATE),
    )


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors: {error}") from error


def _read_facts(file: Path) -> dict[str, Json]:
    try:
        facts: dict[str, Json] = read_object(file, follow_links=False)["facts"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    return facts
