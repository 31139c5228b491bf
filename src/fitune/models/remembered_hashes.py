"""Hashes of large files, kept in fitune's cache until the file changes, so that one is hashed once."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from fitune.spec.cache_folder import cache_folder
from fitune.spec.disk import read_text, write_atomically

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
