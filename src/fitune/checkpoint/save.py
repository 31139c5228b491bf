"""Save a TrainState so that it is whole or absent, whatever happens on the way and to whichever rank.

checkpoints/.tmp-step-20-<pid>-<random>/    every rank writes and syncs its files here; the first one COMMIT, last
checkpoints/step-20/                        the same folder after one rename: from here on the checkpoint exists
checkpoints/latest, best                    relative links, for people
then all but the newest ``keep`` and the best are removed, and only because of others that are valid (prune.py)

The first rank begins and commits; in between each rank writes its share, all at the same time.
"""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitune.checkpoint.commit import (
    ABANDONED,
    COMMIT,
    FOLDER,
    LOG,
    STATE,
    Commit,
    Descent,
    OnNote,
    Parent,
    keep_line,
    note_as_known,
    set_aside,
    step_folders,
)
from fitune.checkpoint.durable import Stored, link_atomically, require_space, sealed, write_hashed
from fitune.checkpoint.prune import prune
from fitune.checkpoint.slices import INDEX, Groups, Share, file_of, index_bytes, joined, share_of
from fitune.checkpoint.state import TrainState, tensor_chunks
from fitune.errors import CheckpointError
from fitune.files import remove_stale_siblings, sync_folder, temporary_sibling, write_synced
from fitune.spec.run_directory import require_real_files
from fitune.spec.serial import to_json
from fitune.units import MIB, format_bytes

_MARGIN_BYTES = MIB
"""Folders, COMMIT, links and the file system's rounding to blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files of one rank, and where the parts in them belong."""

    files: dict[str, Stored]
    slices: Groups


def save_checkpoint(
    root: Path,
    state: TrainState,
    *,
    descent: Descent,
    keep: int,
    eval_loss: float | None,
    on_note: OnNote = lambda note: None,
) -> Path:
    """Write ``root/checkpoints/step-N`` and return it; ``root`` is the run directory, owned by this process alone.

    Afterwards the newest ``keep`` valid ones of the line and the one with the lowest evaluation loss remain;
    ``on_note`` is told of others that are set aside. Raises CheckpointError when the disk is too small or fails;
    whatever was there before is then still there.
    """
    share = share_of(state, rank=0)
    folder = begin_save(root, share, descent=descent, needed_bytes=share_bytes(share))
    try:
        written = write_share(folder, share, rank=0)
    except OSError as error:
        abandon_save(root)
        cause = f"checkpoint step-{share.step} could not be saved: {error.strerror}"
        raise save_failed(root, cause, needed_bytes=share_bytes(share)) from error
    return commit_save(
        root, folder, share, [written], descent=descent, keep=keep, eval_loss=eval_loss, on_note=on_note
    )


def checkpoint_bytes(state: TrainState) -> int:
    """Free space that a save of ``state`` by one process needs."""
    return share_bytes(share_of(state, rank=0))


def share_bytes(share: Share) -> int:
    """Free space that a rank needs for its files."""
    return share.bytes + len(_facts(share)) + len(share.log) + _MARGIN_BYTES


def _facts(share: Share) -> bytes:
    return json.dumps({"step": share.step, "facts": share.facts}, indent=1, ensure_ascii=False).encode()


def begin_save(root: Path, share: Share, *, descent: Descent, needed_bytes: int) -> Path:
    """Make the temporary folder for the files of all ranks, which take ``needed_bytes``. Called by the first rank.

    Raises CheckpointError when the disk is too small or fails.
    """
    folder = root / FOLDER
    name = f"step-{share.step}"
    try:
        require_real_files(root, names=(FOLDER,))  # a link put there meanwhile would lead the pruning astray
        folder.mkdir(parents=True, exist_ok=True)
        keep_line(folder, descent.line)
        remove_stale_siblings(folder)
        require_space(folder, needed_bytes, what=f"checkpoint {name}")
        temporary = temporary_sibling(folder / name)
        os.mkdir(temporary)
    except OSError as error:
        cause = f"checkpoint {folder / name} could not be saved: {error.strerror}"
        raise save_failed(root, cause, needed_bytes=needed_bytes) from error
    return temporary


def write_share(folder: Path, share: Share, *, rank: int) -> Written:
    """Write this rank's tensors into ``folder``, hashed and synced. Raises OSError."""
    groups = [(file_of(group), tensors) for group, tensors in share.whole.items()]
    groups += [(file_of(group, rank), tensors) for group, tensors in share.parts.items()]
    files = {name: write_hashed(folder / name, tensor_chunks(tensors)) for name, tensors in groups}
    return Written(files=files, slices=share.slices)


def commit_save(
    root: Path,
    temporary: Path,
    share: Share,
    written: Sequence[Written],
    *,
    descent: Descent,
    keep: int,
    eval_loss: float | None,
    on_note: OnNote,
    spare: Collection[str] = (),
) -> Path:
    """Make a checkpoint of what all ranks have ``written`` and return its folder. Called by the first rank.

    ``spare`` names older ones that stay for now, whatever ``keep`` says.
    Raises CheckpointError when the disk fails, or a file or a part of a tensor is not there.
    """
    target = root / FOLDER / f"step-{share.step}"
    try:
        commit = _commit(target, temporary, share, written, descent, eval_loss, on_note)
    except OSError as error:
        abandon_save(root)
        cause = f"checkpoint {target} could not be saved: {error.strerror}"
        raise save_failed(root, cause, needed_bytes=share_bytes(share)) from error
    except CheckpointError:
        abandon_save(root)
        raise
    descent.parent = Parent(step=commit.step, digest=commit.digest)
    note_as_known(target, commit.files)
    _tidy(target, descent, keep, on_note, spare)
    return target


def _commit(
    target: Path,
    temporary: Path,
    share: Share,
    written: Sequence[Written],
    descent: Descent,
    eval_loss: float | None,
    on_note: OnNote,
) -> Commit:
    files = {name: stored for one in written for name, stored in one.files.items()}
    _require_there(temporary, files)
    index = joined([one.slices for one in written])
    texts = {LOG: share.log, STATE: _facts(share)}
    if index.groups:
        texts[INDEX] = index_bytes(index)
    for name, content in texts.items():
        files[name] = write_hashed(temporary / name, [content])
    unsealed = Commit(
        step=share.step, line=descent.line, parent=descent.parent, eval_loss=eval_loss, files=files
    )
    commit: Commit = sealed(unsealed)
    write_synced(temporary / COMMIT, [to_json(commit).encode()])
    sync_folder(temporary)
    if target.exists():  # of this very attempt, or put there by hand: nothing is written over
        on_note(set_aside(target, ABANDONED))
    os.rename(temporary, target)
    sync_folder(target.parent)
    return commit


def _require_there(folder: Path, files: dict[str, Stored]) -> None:
    """Another machine may have written its files into a folder of its own, under the same name."""
    for name, stored in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != stored.bytes:
            raise CheckpointError(
                f"{file}: a rank wrote {format_bytes(stored.bytes)}, and rank 0 does not find them there",
                hint="output_dir must be in a file system that all machines share",
            )


def abandon_save(root: Path) -> None:
    """Remove what was written for a checkpoint that will not be."""
    try:
        remove_stale_siblings(root / FOLDER)
    except OSError:
        return  # the disk that failed may fail again; the next save tries once more


def save_failed(root: Path, cause: str, *, needed_bytes: int) -> CheckpointError:
    """The error of a save that failed for ``cause``: what it needs, and which checkpoint there is."""
    saved = step_folders(root / FOLDER)
    last = f"The last saved one is {saved[-1].name}." if saved else "None was saved before."
    return CheckpointError(
        f"{cause}; it needs {format_bytes(needed_bytes)}. {last}",
        hint="free some space or choose another output_dir, then resume",
    )


def _tidy(newest: Path, descent: Descent, keep: int, on_note: OnNote, spare: Collection[str]) -> None:
    folder = newest.parent
    try:
        link_atomically(folder / "latest", newest.name)
        prune(folder, descent.line, keep=keep, on_note=on_note, spare=spare)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {newest} is saved, but {folder} could not be tidied: {error.strerror}",
            hint="resume from it once the cause is gone",
        ) from error
