"""Find, check and read a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.commit import (
    ABANDONED,
    DAMAGED,
    FOLDER,
    LOG,
    STATE,
    Attempt,
    Descent,
    Line,
    OnNote,
    Parent,
    present_line,
    read_commit,
    set_aside,
    step_folders,
    verify,
    write_line,
)
from fitune.checkpoint.slices import INDEX, Groups, SavedTensors, groups_in, read_index
from fitune.checkpoint.state import Json, TrainState
from fitune.errors import CheckpointError
from fitune.files import read_bytes
from fitune.spec.serial import TABLE_BYTES, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest valid checkpoint of the present line; None when there is none."""

    path: Path | None
    warnings: tuple[str, ...] = ()
    """One for each newer checkpoint that does not count, and for a line that cannot be read."""
    damaged: tuple[Path, ...] = ()


def newest_checkpoint(root: Path) -> Found:
    """The newest valid one of the present line in ``root/checkpoints``; every file of it was hashed."""
    folder = root / FOLDER
    folders = step_folders(folder)
    line, warnings = present_line(folder, any_saved=bool(folders))
    damaged: list[Path] = []
    for path in reversed(folders):
        try:
            commit = read_commit(path)
            if not commit.is_on(line):
                warnings.append(f"{path.name} is skipped: the run went on from an older step")
                continue
            verify(path)
        except CheckpointError as error:
            warnings.append(f"{path.name} is skipped: {error.message}")
            damaged.append(path)
            continue
        return Found(
            path=path, warnings=(*warnings, *_lost(line, commit.step, folders)), damaged=tuple(damaged)
        )
    return Found(path=None, warnings=(*warnings, *_lost(line, 0, folders)), damaged=tuple(damaged))


def begin_line(
    root: Path, *, attempt: str, base: Path | None, damaged: tuple[Path, ...], on_note: OnNote
) -> Descent:
    """Make this attempt the end of the present line; whatever is not on it, or damaged, is set aside.

    The line is written first: from then on an abandoned checkpoint counts no longer, wherever it lies.
    ``base``: the checkpoint that the attempt goes on from. Raises CheckpointError.
    """
    folder = root / FOLDER
    descent = Descent(line=(Attempt(id=attempt, after=0),))
    if base is not None:
        commit = read_commit(base)
        descent.line = (*commit.line, Attempt(id=attempt, after=commit.step))
        descent.parent = Parent(step=commit.step, digest=commit.digest)
    try:
        if base is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            write_line(folder, descent.line)
            for path in reversed(step_folders(folder)):
                word = DAMAGED if path in damaged else _word(path, descent.line)
                if word:
                    on_note(set_aside(path, word))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror}", hint="check the free space and the permissions"
        ) from error
    return descent


def load_checkpoint(path: Path, *, verified: bool = False) -> TrainState:
    """Read ``path``; its tensors are read, to the host, when they are asked for.

    ``verified`` saves the hashing that ``newest_checkpoint`` just did.
    Raises CheckpointError naming the file that is missing, truncated or changed.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such checkpoint", hint="--resume without a path takes the newest one of output_dir"
        )
    if (path / FOLDER).is_dir():
        found = newest_checkpoint(path).path
        raise CheckpointError(
            f"{path} is the directory of a run, not a checkpoint",
            hint=f"resume: {found}" if found else "it holds no checkpoint; start a new run",
        )
    commit = read_commit(path) if verified else verify(path)
    file = path
    try:
        file, divided = path / INDEX, Groups()
        if INDEX in commit.files:
            divided = read_index(read_bytes(file, limit=TABLE_BYTES, follow_links=False))
        file = path / STATE
        content = read_object(file, largest_bytes=TABLE_BYTES, follow_links=False)
        facts: dict[str, Json] = content["facts"]
        file, log = path / LOG, b""
        if LOG in commit.files:
            log = read_bytes(file, limit=commit.files[LOG].bytes, follow_links=False)
    except (OSError, ValueError, KeyError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{file}: cannot be read: {cause}") from error
    if content.get("step") != commit.step:
        raise CheckpointError(
            f"{path / STATE}: of step {content.get('step')!r}, and COMMIT is of step {commit.step}"
        )
    groups = groups_in(commit.files, divided)
    tensors = {group: SavedTensors(path, group, divided.get(group, {})) for group in groups}
    return TrainState(step=commit.step, tensors=tensors, facts=facts, log=log)


def _lost(line: Line | None, found_step: int, folders: list[Path]) -> list[str]:
    """Says so when the checkpoint that the last attempt went on from is not there."""
    after = line[-1].after if line else 0
    if after <= found_step or any(path.name == f"step-{after}" for path in folders):
        return []
    return [f"step-{after}, from which the last attempt went on, is not in {FOLDER}/"]


def _word(path: Path, line: Line) -> str:
    """Reason why ``path`` is set aside; empty when it is kept. Kept files are hashed before one is counted on."""
    try:
        return "" if read_commit(path).is_on(line) else ABANDONED
    except CheckpointError:
        return DAMAGED
