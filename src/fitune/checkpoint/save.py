"""Save a TrainState so that it is whole or absent, whatever happens on the way and to whichever rank.

checkpoints/.tmp-step-20-<pid>-<random>/    every rank writes and syncs its files here; the first one COMMIT, last
checkpoints/step-20/                        the same folder after one rename: from here on the checkpoint exists
checkpoints/latest, best                    relative links, for people
then all but the newest ``keep`` and the best are removed, and only because of others that are valid (prune)

The first rank begins and commits; in between each rank writes its share, all at the same time.
"""

import json
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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
    Stored,
    keep_line,
    link_atomically,
    loss_of,
    note_as_known,
    put_in_place,
    read_commit,
    require_space,
    sealed,
    set_aside,
    step_folders,
    verify,
    write_hashed,
)
from fitune.checkpoint.slices import INDEX, Groups, Share, joined
from fitune.checkpoint.state import tensor_chunks
from fitune.errors import CheckpointError
from fitune.files import remove, remove_stale_siblings, temporary_sibling, write_atomically
from fitune.units import MIB, format_bytes
from fitune.values.run_directory import require_real_files
from fitune.values.serial import to_data, to_json

_MARGIN_BYTES = MIB
"""Folders, COMMIT, links and the file system's rounding to blocks."""
_FULL = "free some space or choose another output_dir, then resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files of one rank, and where the parts in them belong."""

    files: dict[str, Stored]
    slices: Groups


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


def write_share(folder: Path, share: Share) -> Written:
    """Write this rank's tensors into ``folder``, hashed and synced. Raises OSError."""
    files = {
        name: write_hashed(folder / name, tensor_chunks(tensors)) for name, tensors in share.files.items()
    }
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
) -> None:
    """Make a checkpoint of what all ranks have ``written``. Called by the first rank, which abandons it on errors.

    ``spare`` names older ones that stay for now, whatever ``keep`` says.
    Raises CheckpointError when the disk fails, or a file or a part of a tensor is not there.
    """
    target = root / FOLDER / f"step-{share.step}"
    files = {name: stored for one in written for name, stored in one.files.items()}
    try:
        for name, stored in files.items():
            # another machine may have written its files into a folder of its own, under the same name
            file = temporary / name
            if not file.is_file() or file.stat().st_size != stored.bytes:
                raise CheckpointError(
                    f"{file}: a rank wrote {format_bytes(stored.bytes)}, and rank 0 does not find them there",
                    hint="output_dir must be in a file system that all machines share",
                )
        index = joined([one.slices for one in written])
        texts = {LOG: share.log, STATE: _facts(share)}
        if index.groups:
            texts[INDEX] = json.dumps(to_data(index), separators=(",", ":")).encode()
        for name, content in texts.items():
            files[name] = write_hashed(temporary / name, [content])
        commit: Commit = sealed(
            Commit(
                step=share.step, line=descent.line, parent=descent.parent, eval_loss=eval_loss, files=files
            )
        )
        # one that is there is of this very attempt, or was put there by hand
        put_in_place(temporary, target, commit, word=ABANDONED, on_note=on_note)
    except OSError as error:
        cause = f"checkpoint {target} could not be saved: {error.strerror}"
        raise save_failed(root, cause, needed_bytes=share_bytes(share)) from error
    descent.parent = Parent(step=commit.step, digest=commit.digest)
    note_as_known(target, commit.files)
    try:
        link_atomically(target.parent / "latest", target.name)
        prune(target.parent, descent.line, keep=keep, on_note=on_note, spare=spare)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {target} is saved, but {target.parent} could not be tidied: {error.strerror}",
            hint="resume from it once the cause is gone",
        ) from error


def add_evaluation(path: Path, eval_loss: float, *, descent: Descent, keep: int, on_note: OnNote) -> None:
    """Let the COMMIT of ``path``, which the run goes on from, have a loss that was measured later: it may be the best.

    Raises CheckpointError when the disk fails.
    """
    try:
        commit: Commit = sealed(replace(read_commit(path), eval_loss=eval_loss))
        write_atomically(path / COMMIT, to_json(commit))
        descent.parent = Parent(step=commit.step, digest=commit.digest)
        note_as_known(path, commit.files)
        prune(path.parent, descent.line, keep=keep, on_note=on_note)
    except OSError as error:
        raise CheckpointError(
            f"{path / COMMIT} could not be written: {error.strerror}", hint=_FULL
        ) from error


def save_failed(root: Path, cause: str, *, needed_bytes: int) -> CheckpointError:
    """The error of a save that failed for ``cause``: what it needs, and which checkpoint there is."""
    saved = step_folders(root / FOLDER)
    last = f"The last saved one is {saved[-1].name}." if saved else "None was saved before."
    return CheckpointError(
        f"{cause}; it needs {format_bytes(needed_bytes)}. {last}",
        hint=_FULL,
    )


def prune(folder: Path, line: Line, *, keep: int, on_note: OnNote, spare: Collection[str] = ()) -> None:
    """Remove checkpoints on ``line`` but the newest ``keep`` valid ones and the best valid one; link the best.

    What counts is hashed, unless this process did so before and the files were not touched since: after a resume that
    is each of the kept ones once. What is damaged is set aside, and what is on another line is left alone. ``spare``
    names others that stay for now.
    Raises OSError.
    """
    members: list[tuple[Path, Commit]] = []
    for path in reversed(step_folders(folder)):
        try:
            if (commit := read_commit(path)).is_on(line):
                members.append((path, commit))
        except CheckpointError as error:
            _set_damaged_aside(path, error, on_note)
    newest = _first_valid(members, keep, on_note)
    by_loss = sorted(
        (m for m in members if loss_of(m[1]) < math.inf), key=lambda m: (loss_of(m[1]), m[1].step)
    )
    best = _first_valid(by_loss, 1, on_note)
    link = folder / "best"
    if best:
        link_atomically(link, best[0].name)
    elif link.is_symlink():
        link.unlink()
    for path, _ in members:
        if path not in newest and path not in best and path.name not in spare and path.exists():
            doomed = temporary_sibling(path.with_name(f"pruned-{path.name}"))
            os.rename(path, doomed)  # a half-removed folder must not look like a damaged checkpoint
            remove(doomed)


def _first_valid(members: list[tuple[Path, Commit]], count: int, on_note: OnNote) -> list[Path]:
    found: list[Path] = []
    for path, _ in members:
        if len(found) == count:
            break
        try:
            verify(path, unless_known=True)
        except CheckpointError as error:
            _set_damaged_aside(path, error, on_note)
        else:
            found.append(path)
    return found


def _set_damaged_aside(path: Path, error: CheckpointError, on_note: OnNote) -> None:
    if path.exists():
        on_note(f"{error.message}: {set_aside(path, DAMAGED)}")
