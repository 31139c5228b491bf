"""Files of a checkpoint: names that stay inside their folder, hashed while written, sealed, linked; and their room."""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

from fitune.errors import CheckpointError, RunDirectoryError
from fitune.files import open_regular, read_bytes, sync_folder, temporary_sibling, write_synced
from fitune.spec.serial import from_data, parse_object, to_json
from fitune.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Hash and size that a file must have when it is read again."""

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


T = TypeVar("T")


def sealed(value: Any) -> Any:
    """``value``, a dataclass with a field ``digest``, with the sha256 of all else in that field."""
    text = to_json(dataclasses.replace(value, digest=""))
    return dataclasses.replace(value, digest=hashlib.sha256(text.encode()).hexdigest())


def read_sealed(cls: type[T], path: Path) -> T:
    """As ``parse_sealed``, of a file. Raises OSError, too."""
    return parse_sealed(cls, read_bytes(path, follow_links=False))


def parse_sealed(cls: type[T], content: bytes) -> T:
    """Raises ValueError when ``content`` is not, byte for byte, what was written."""
    data = parse_object(content)
    if "digest" not in data:
        raise ValueError("it is of an older format, without a digest of itself")
    value = from_data(cls, data)
    if to_json(sealed(value)).encode() != content:
        raise ValueError("its content does not match its digest")
    return value


def inside(root: Path, name: str) -> Path:
    """``root / name`` for a name that stays below ``root``.

    Raises RunDirectoryError for absolute names, names with ``..`` and names that pass through a symbolic link.
    """
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or "\\" in name:
        raise RunDirectoryError(f"{name!r} is not a name inside {root}", hint="use a plain name like run-1")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive:
        raise RunDirectoryError(
            f"{name!r} is absolute, outside {root}", hint="use a name relative to the folder"
        )
    if ".." in parts:
        raise RunDirectoryError(f"{name!r} leaves {root}", hint="use a name without '..'")
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise RunDirectoryError(
                f"{path} is a symbolic link, to {os.readlink(path)}", hint="remove the link"
            )
    return path
