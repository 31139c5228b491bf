"""Files that are on the disk when a function returns, the same way in every room.

A rename or a new name is durable only after its folder was synced too (man 2 fsync, NOTES).
"""

import os
from collections.abc import Iterable
from pathlib import Path

TEMPORARY = ".tmp-"
"""How the name of every unfinished file and folder begins."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file is the old one or the new one, never a part of it. Raises OSError; nothing unfinished is left then."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    data = content.encode() if isinstance(content, str) else content
    try:
        write_synced(temporary, [data])
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write the chunks one after another and sync. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for chunk in chunks:
            _write_all(handle, memoryview(chunk))
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(handle, view) :]  # Linux takes at most 2 GiB in one call


def sync_folder(folder: Path) -> None:
    """Takes a file as well: fsync needs no handle that can write."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync files that a library wrote, then the folder that names them."""
    for path in folder.rglob("*"):
        sync_folder(path)
    sync_folder(folder)
