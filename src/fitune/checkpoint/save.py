"""Save a TrainState so that it is whole or absent, whatever happens on the way; remove those that nobody needs.

checkpoints/.tmp-step-20-<pid>-<random>/    files are written and synced here, COMMIT last
checkpoints/step-20/                        the same folder after one rename: from here on the checkpoint exists
checkpoints/latest, best                    relative links, for people
then all but the newest ``keep`` and the best are removed, and only because of others that are valid
"""

import json
import math
import os
from pathlib import Path

from fitune.checkpoint.commit import (
    ABANDONED,
    COMMIT,
    DAMAGED,
    FOLDER,
    LOG,
    STATE,
    Commit,
    Descent,
    Line,
    OnNote,
    Parent,
    is_on,
    keep_line,
    note_as_known,
    read_commit,
    set_aside,
    step_folders,
    verify_unless_known,
)
from fitune.checkpoint.durable import link_atomically, require_space, sealed, write_hashed
from fitune.checkpoint.state import TrainState, tensor_chunks, tensors_bytes
from fitune.errors import CheckpointError
from fitune.files import remove, remove_stale_siblings, sync_folder, temporary_sibling, write_synced
from fitune.spec.run_directory import require_real_files
from fitune.spec.serial import to_json
from fitune.units import MIB, format_bytes

_MARGIN_BYTES = MIB
"""Folders, COMMIT, links and the file system's rounding to blocks."""


def save_checkpoint(
    root: Path,
    state: TrainState,
    *,
    descent: Descent,
    keep: int,
    eval_loss: float | None,
    on_note: OnNote = lambda note: None,
) -> Path:
    """Write ``root/checkpoints/step-N`` and return it; ``root`` is the run directory, owned by this process.

    Afterwards the newest ``keep`` valid ones of the line and the one with the lowest evaluation loss remain;
    ``on_note`` is told of others that are set aside. Raises CheckpointError when the disk is too small or fails;
    whatever was there before is then still there.
    """
    if keep < 1:
        raise CheckpointError(
            f"keep_checkpoints {keep} would remove the checkpoint just written", hint="1 or more"
        )
    folder = root / FOLDER
    target = folder / f"step-{state.step}"
    needed = checkpoint_bytes(state)
    try:
        require_real_files(root, names=(FOLDER,))  # a link put there meanwhile would lead the pruning astray
        folder.mkdir(parents=True, exist_ok=True)
        keep_line(folder, descent.line)
        remove_stale_siblings(folder)
        require_space(folder, needed, what=f"checkpoint {target.name}")
        commit = _write(target, state, descent, eval_loss, on_note)
    except OSError as error:
        _clean_up(folder)
        raise CheckpointError(
            f"checkpoint {target} could not be saved: {error.strerror}; "
            f"it needs {format_bytes(needed)}. {_last(folder)}",
            hint="free some space or choose another output_dir, then resume",
        ) from error
    descent.parent = Parent(step=commit.step, digest=commit.digest)
    note_as_known(target, commit.files)
    _tidy(folder, target, descent, keep, on_note)
    return target


def checkpoint_bytes(state: TrainState) -> int:
    """Free space that one save needs."""
    tensors = sum(tensors_bytes(group) for group in state.tensors.values())
    return tensors + len(_facts(state)) + len(state.log) + _MARGIN_BYTES


def _facts(state: TrainState) -> bytes:
    return json.dumps({"step": state.step, "facts": state.facts}, indent=1, ensure_ascii=False).encode()


def _write(
    target: Path, state: TrainState, descent: Descent, eval_loss: float | None, on_note: OnNote
) -> Commit:
    temporary = temporary_sibling(target)
    os.mkdir(temporary)
    files = {
        name: write_hashed(temporary / name, chunks)
        for name, chunks in (
            *((f"{group}.safetensors", tensor_chunks(tensors)) for group, tensors in state.tensors.items()),
            (LOG, [state.log]),
            (STATE, [_facts(state)]),
        )
    }
    unsealed = Commit(
        step=state.step, line=descent.line, parent=descent.parent, eval_loss=eval_loss, files=files
    )
    commit: Commit = sealed(unsealed)
    write_synced(temporary / COMMIT, [to_json(commit).encode()])
    sync_folder(temporary)
    if target.exists():  # of this very attempt, or put there by hand: nothing is written over
        on_note(set_aside(target, ABANDONED))
    os.rename(temporary, target)
    sync_folder(target.parent)
    return commit


def _tidy(folder: Path, newest: Path, descent: Descent, keep: int, on_note: OnNote) -> None:
    try:
        link_atomically(folder / "latest", newest.name)
        prune(folder, descent.line, keep=keep, on_note=on_note)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {newest} is saved, but {folder} could not be tidied: {error.strerror}",
            hint="resume from it once the cause is gone",
        ) from error


def _clean_up(folder: Path) -> None:
    try:
        remove_stale_siblings(folder)
    except OSError:
        return  # the disk that failed may fail again; the next save tries once more


def _last(folder: Path) -> str:
    saved = step_folders(folder)
    return f"The last saved one is {saved[-1].name}." if saved else "None was saved before."


def prune(folder: Path, line: Line, *, keep: int, on_note: OnNote) -> None:
    """Remove checkpoints on ``line`` but the newest ``keep`` valid ones and the best valid one; link the best.

    What counts is hashed, unless this process did so before and the files were not touched since: after a resume that
    is each of the kept ones once. What is damaged is set aside, and what is on another line is left alone.
    Raises OSError.
    """
    members: list[tuple[Path, Commit]] = []
    for path in reversed(step_folders(folder)):
        try:
            members.append((path, read_commit(path)))
        except CheckpointError as error:
            _set_damaged_aside(path, error, on_note)
    members = [(path, c) for path, c in members if is_on(line, saved_on=c.line, step=c.step)]
    newest = _first_valid(members, keep, on_note)
    by_loss = sorted((m for m in members if _loss(m[1]) < math.inf), key=lambda m: (_loss(m[1]), m[1].step))
    best = _first_valid(by_loss, 1, on_note)
    _link_best(folder, best)
    for path, _ in members:
        if path not in newest and path not in best and path.exists():
            doomed = temporary_sibling(path.with_name(f"pruned-{path.name}"))
            os.rename(path, doomed)  # a half-removed folder must not look like a damaged checkpoint
            remove(doomed)


def _first_valid(members: list[tuple[Path, Commit]], count: int, on_note: OnNote) -> list[Path]:
    found: list[Path] = []
    for path, _ in members:
        if len(found) == count:
            break
        try:
            verify_unless_known(path)
        except CheckpointError as error:
            _set_damaged_aside(path, error, on_note)
        else:
            found.append(path)
    return found


def _set_damaged_aside(path: Path, error: CheckpointError, on_note: OnNote) -> None:
    if path.exists():
        on_note(f"{error.message}: {set_aside(path, DAMAGED)}")


def _loss(commit: Commit) -> float:
    """Infinite for what is no candidate for the best; the earlier one of two equals is taken."""
    loss = commit.eval_loss
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _link_best(folder: Path, best: list[Path]) -> None:
    link = folder / "best"
    if best:
        link_atomically(link, best[0].name)
    elif link.is_symlink():
        link.unlink()
