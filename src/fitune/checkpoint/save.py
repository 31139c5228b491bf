"""Save a TrainState so that it is whole or absent, whatever happens on the way.

checkpoints/.tmp-step-20-<pid>-<random>/    files are written and synced here, COMMIT last
checkpoints/step-20/                        the same folder after one rename: from here on the checkpoint exists
checkpoints/latest, best                    relative links, for people
then all but the newest ``keep`` and the best are removed (prune.py)
"""

import json
import os
from pathlib import Path

from fitune.checkpoint.aside import ABANDONED, OnNote, set_aside
from fitune.checkpoint.commit import COMMIT, FOLDER, LOG, STATE, Commit, note_as_known, step_folders
from fitune.checkpoint.durable import link_atomically, require_space, write_hashed
from fitune.checkpoint.line import Descent, Parent, keep_line
from fitune.checkpoint.prune import prune
from fitune.checkpoint.sealed import sealed
from fitune.checkpoint.state import TrainState
from fitune.checkpoint.tensors import tensor_chunks, tensors_bytes
from fitune.errors import CheckpointError
from fitune.files import remove_stale_siblings, sync_folder, temporary_sibling, write_synced
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
