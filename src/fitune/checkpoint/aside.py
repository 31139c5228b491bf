"""Checkpoints that count no longer are moved aside under another name: never preferred, never deleted."""

import os
from collections.abc import Callable
from pathlib import Path

from fitune.files import sync_folder
from fitune.units import format_bytes

OnNote = Callable[[str], None]
"""Told a line for people."""

DAMAGED = "damaged"
ABANDONED = "abandoned"


def set_aside(path: Path, word: str) -> str:
    """Rename step-N to <word>-step-N and return a line that says so. Raises OSError."""
    target = path.with_name(f"{word}-{path.name}")
    number = 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{word}-{path.name}-{number}")
    os.rename(path, target)
    sync_folder(path.parent)
    return f"{path.name} is now {target.name} ({_why[word]}, {format_bytes(_size(target))}; delete it if you like)"


_why = {
    DAMAGED: "its files are not what was saved",
    ABANDONED: "the run went on from an older step",
}


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*"))
