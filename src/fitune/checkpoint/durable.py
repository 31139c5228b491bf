"""Files of a checkpoint: hashed while they are written, linked; and the room they need."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fitune.errors import CheckpointError
from fitune.files import open_regular, sync_folder, temporary_sibling, write_synced
from fitune.units import format_bytes


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
    temporary = temporary_sibling(link)
    os.symlink(name, temporary)
    os.replace(temporary, link)
    sync_folder(link.parent)


def hash_file(path: Path) -> Stored:
    """Raises OSError."""
    with open_regular(path, follow_links=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Stored(sha256=digest, bytes=file.tell())


def require_space(folder: Path, needed_bytes: int, *, what: str) -> None:
    """Raises CheckpointError with the arithmetic when ``folder`` has no room for ``needed_bytes``."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{what} needs {format_bytes(needed_bytes)}, {format_bytes(free)} free in {folder}, "
            f"{format_bytes(needed_bytes - free)} short",
            hint="free some space, choose another output_dir, or keep fewer checkpoints (keep_checkpoints)",
        )
