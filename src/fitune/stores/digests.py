"""Hashes that stores give for what they hold, computed for a file of this machine."""

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fitune.files import open_regular
from fitune.units import MIB

_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of a file."""
_PART_BYTES = 16 * MIB
_READ_BYTES = 4 * MIB
_MD5 = re.compile(r"([0-9a-f]{32})(?:-(\d+))?")

_known: dict[tuple[int, int, int, int], dict[int, str]] = {}
"""File as the system knows it (device, inode, size, time of change) -> size of a part -> ETag."""


def part_bytes(size: int) -> int:
    """Bytes of each part in which a file of ``size`` is sent; one of less than two parts is sent whole."""
    return max(_PART_BYTES, -(-size // (_MOST_PARTS * MIB)) * MIB)


def etag(file: Path) -> str:
    """The MD5 of a small file; of one sent in parts the MD5 of their MD5s, a dash and their number, as S3 has it.

    Raises OSError.
    """
    found = os.stat(file)
    key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    part = part_bytes(found.st_size)
    known = _known.setdefault(key, {})
    if part not in known:
        known[part] = _etag(file, found.st_size, part)
    return known[part]


def _etag(file: Path, size: int, part: int) -> str:
    parts: list[bytes] = []
    whole = size if size < 2 * part else part
    with open_regular(file) as source:
        while True:
            digest, left = hashlib.md5(usedforsecurity=False), whole
            while left and (block := source.read(min(left, _READ_BYTES))):
                digest.update(block)
                left -= len(block)
            if parts and left == whole:
                break
            parts.append(digest.digest())
            if size < 2 * part:
                return digest.hexdigest()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def is_same(file: Path, said: Mapping[str, Any]) -> bool | None:
    """True if the store's words about its file fit to ``file``, by size and hash; None where it gives no such hash.

    Raises OSError.
    """
    size = os.stat(file).st_size
    if said.get("size") is not None and int(said["size"]) != size:
        return False
    if md5 := said.get("md5Hash"):
        with open_regular(file) as source:
            return base64.b64decode(md5) == hashlib.file_digest(source, "md5").digest()
    match = _MD5.fullmatch(str(said.get("ETag", "")).strip('"'))
    part = part_bytes(size)
    expected_parts = "" if size < 2 * part else str(-(-size // part))
    if match is None or (match[2] or "") != expected_parts:
        return None  # encrypted by a key of the store, or sent in other parts: its ETag is no hash that we can make
    return etag(file) == match[0]
