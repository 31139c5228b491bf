"""Which checkpoints are kept: the newest few that are valid, and the best."""

import math
import os
from collections.abc import Collection
from pathlib import Path

from fitune.checkpoint.commit import (
    DAMAGED,
    Commit,
    Line,
    OnNote,
    is_on,
    read_commit,
    set_aside,
    step_folders,
    verify_unless_known,
)
from fitune.checkpoint.durable import link_atomically
from fitune.errors import CheckpointError
from fitune.files import remove, temporary_sibling


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
            members.append((path, read_commit(path)))
        except CheckpointError as error:
            _set_damaged_aside(path, error, on_note)
    members = [(path, c) for path, c in members if is_on(line, saved_on=c.line, step=c.step)]
    newest = _first_valid(members, keep, on_note)
    by_loss = sorted(
        (m for m in members if loss_of(m[1]) < math.inf), key=lambda m: (loss_of(m[1]), m[1].step)
    )
    best = _first_valid(by_loss, 1, on_note)
    _link_best(folder, best)
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
            verify_unless_known(path)
        except CheckpointError as error:
            _set_damaged_aside(path, error, on_note)
        else:
            found.append(path)
    return found


def _set_damaged_aside(path: Path, error: CheckpointError, on_note: OnNote) -> None:
    if path.exists():
        on_note(f"{error.message}: {set_aside(path, DAMAGED)}")


def loss_of(commit: Commit) -> float:
    """Infinite for what is no candidate for the best; the earlier one of two equals is taken."""
    loss = commit.eval_loss
    return loss if loss is not None and math.isfinite(loss) else math.inf


def _link_best(folder: Path, best: list[Path]) -> None:
    link = folder / "best"
    if best:
        link_atomically(link, best[0].name)
    elif link.is_symlink():
        link.unlink()
