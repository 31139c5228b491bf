"""Files that are on the disk when a function returns: written, hashed and synced.

A rename or a new name is durable only after its folder was synced too (man 2 fsync, NOTES).
"""

import glob
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import CheckpointError
from fitune.units import MIB, format_bytes

_READ_BYTES = 4 * MIB
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a file must still be when it is read again."""

    sha256: str
    bytes: int


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> Stored:
    """Write the chunks, hash them on the way (no second read), sync. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            digest.update(view)
            size += view.nbytes
            _write_all(handle, view)
        os.fsync(handle)
    finally:
        os.close(handle)
    return Stored(sha256=digest.hexdigest(), bytes=size)


def _write_all(handle: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(handle, view) :]  # Linux takes at most 2 GiB in one call


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, never a part of it."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}")
    write_durably(temporary, [text.encode()])
    os.replace(temporary, path)
    sync_folder(path.parent)


def link_atomically(link: Path, name: str) -> None:
    """Let ``link`` point to its sibling ``name``; relative, so that the run may be moved."""
    temporary = link.with_name(f"{_TEMPORARY}{link.name}")
    temporary.unlink(missing_ok=True)
    os.symlink(name, temporary)
    os.replace(temporary, link)
    sync_folder(link.parent)


def hash_file(path: Path) -> Stored:
    """Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Stored(sha256=digest.hexdigest(), bytes=size)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync files that a library wrote, then the folder that names them."""
    for path in folder.rglob("*"):
        sync_folder(path)  # fsync takes a read-only handle of a file as well
    sync_folder(folder)


def temporary_sibling(target: Path) -> Path:
    """A hidden name next to ``target`` that says whose it is."""
    return target.with_name(f"{_TEMPORARY}{target.name}-{os.getpid()}")


def remove_stale_siblings(folder: Path, name: str = "") -> None:
    """Remove what dead processes, or an earlier failure of this one, left half done of ``name`` in ``folder``."""
    for path in folder.glob(f"{_TEMPORARY}{glob.escape(name)}*"):
        owner = path.name.rpartition("-")[2]
        if not (owner.isdigit() and int(owner) != os.getpid() and process_lives(int(owner))):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder that may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def process_lives(pid: int) -> bool:
    """On this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's process is a process
    return True


def require_space(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raises CheckpointError with the arithmetic when ``folder`` has no room for ``needed_bytes``."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{what} needs {format_bytes(needed_bytes)}, {format_bytes(free)} free in {folder}, "
            f"{format_bytes(needed_bytes - free)} short",
            hint="free some space, choose another output_dir, or keep fewer checkpoints (keep_checkpoints)",
        )
