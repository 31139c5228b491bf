"""A hash of every byte of a model's files, to tell whether it is still the same model.

Hashes are kept in fitune's cache until the file changes, so that a large file is hashed once.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fitune.files import cache_folder, open_regular, read_text, write_atomically

_MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_THREADS = 4
"""Files hashed at once: sha256 lets the others run, and four keep up with one NVMe drive."""


def identity(path: str) -> str:
    """A Hub id as it is; a folder's name and a hash of its files, wherever it lies now."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return path
    return f"{folder.resolve().name}, files {_hash_of(_files(folder, _MODEL_FILES))}"


def base_reference(path: str) -> str:
    """How a file names the base that it belongs to: a folder by its absolute path, a Hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def weights_identity(path: str) -> str:
    """A hash of the weights alone, whatever the folder is called; a Hub id as it is."""
    folder = Path(path)
    return _hash_of(weight_files(folder)) if folder.is_dir() else path


def weight_files(folder: Path) -> list[Path]:
    return _files(folder, (".safetensors",))


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())


def _hash_of(files: Sequence[Path]) -> str:
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(_file_hash, files))
    lines = [f"{file.name} {found}" for file, found in zip(files, hashes, strict=True)]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _file_hash(file: Path) -> str:
    """sha256 of every byte: processors have instructions for it, so it is faster here than younger hashes."""
    known = remembered(file)
    if known is not None:
        return known
    before = file.stat()
    with open_regular(file) as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    remember(file, found, as_of=before)
    return found


_SETTLED_S = 2.0
"""A file younger than this may change again within one tick of the file system's clock and look the same."""


def remembered(file: Path) -> str | None:
    """The hash that ``remember`` was told, when the file is still the same one by all that the system says of it."""
    try:
        entry = json.loads(read_text(_entry(file), follow_links=False))
        return str(entry["sha256"]) if entry["file"] == _facts(file, file.stat()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never hashed, or an entry that cannot be read: it is hashed again


def remember(file: Path, sha256: str, *, as_of: os.stat_result) -> None:
    """Keep the hash of ``file``; ``as_of`` is its state before it was read. A cache that cannot be written costs time
    only."""
    facts = _facts(file, as_of)
    with suppress(OSError):
        is_settled = time.time() - max(as_of.st_mtime, as_of.st_ctime) > _SETTLED_S
        if is_settled and facts == _facts(file, file.stat()):
            entry = _entry(file)
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(entry, json.dumps({"file": facts, "sha256": sha256}))


def _facts(file: Path, state: os.stat_result) -> dict[str, str | int]:
    """The time of change is beside that of modification: whoever sets the second back cannot set the first."""
    return {
        "path": str(file.resolve()),
        "bytes": state.st_size,
        "modified_ns": state.st_mtime_ns,
        "changed_ns": state.st_ctime_ns,
        "device": state.st_dev,
        "inode": state.st_ino,
    }


def _entry(file: Path) -> Path:
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    return cache_folder() / "hashes" / f"{name}.json"
