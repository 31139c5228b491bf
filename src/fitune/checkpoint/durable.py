"""Files of a checkpoint: hashed while they are written, linked, removed; and the room they need."""

import glob
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import CheckpointError
from fitune.spec.disk import TEMPORARY, open_regular, sync_folder, write_synced
from fitune.spec.ownership import process_lives
from fitune.units import MIB, format_bytes

_READ_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a file must still be when it is read again."""

    sha256: str
    bytes: int


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> Stored:
    """Write the chunks, hash them on the way (no second read), sync. Raises OSError."""
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[memoryview]:
        nonlocal size
        for chunk in chunks:
            view = memoryview(chunk)
            digest.update(view)
            size += view.nbytes
            yield view

    write_synced(path, hashed())
    return Stored(sha256=digest.hexdigest(), bytes=size)


def link_atomically(link: Path, name: str) -> None:
    """Let ``link`` point to its sibling ``name``; relative, so that the run may be moved."""
    temporary = link.with_name(f"{TEMPORARY}{link.name}")
    temporary.unlink(missing_ok=True)
    os.symlink(name, temporary)
    os.replace(temporary, link)
    sync_folder(link.parent)


def hash_file(path: Path) -> Stored:
    """Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path, follow_links=False) as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Stored(sha256=digest.hexdigest(), bytes=size)


def temporary_sibling(target: Path) -> Path:
    """A hidden name next to ``target`` that says whose it is."""
    return target.with_name(f"{TEMPORARY}{target.name}-{os.getpid()}")


def remove_stale_siblings(folder: Path, name: str = "") -> None:
    """Remove what dead processes, or an earlier failure of this one, left half done of ``name`` in ``folder``."""
    for path in folder.glob(f"{TEMPORARY}{glob.escape(name)}*"):
        owner = path.name.rpartition("-")[2]
        if not (owner.isdigit() and int(owner) != os.getpid() and process_lives(int(owner))):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder that may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_space(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raises CheckpointError with the arithmetic when ``folder`` has no room for ``needed_bytes``."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{what} needs {format_bytes(needed_bytes)}, {format_bytes(free)} free in {folder}, "
            f"{format_bytes(needed_bytes - free)} short",
            hint="free some space, choose another output_dir, or keep fewer checkpoints (keep_checkpoints)",
        )
