"""Files in stores, listed and read as a stream: a cut connection is taken up again where it was."""

import base64
import hashlib
import io
import os
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from fitune.errors import DataError, FituneError
from fitune.files import open_regular
from fitune.stores import opening
from fitune.stores.opening import CLIENTS, Patience, asking, cause_of, open_store
from fitune.units import MIB, format_bytes

_BLOCK_BYTES = 8 * MIB
"""Asked of a store at once, so memory per open file is some of these."""
_HASHES = ("etag", "md5hash", "content_md5", "sha256", "crc32c", "checksum")
_TIMES = (
    "lastmodified",
    "last-modified",
    "last_modified",
    "mtime",
    "updated",
    "modified",
    "modificationtime",
    "created",
)


def look_up(url: str, *, is_pattern: bool) -> tuple[Literal["file", "folder", "pattern"], tuple[str, ...]]:
    """The kind of thing that ``url`` names, and the URLs of its files: one, all of a folder, or those of a pattern.

    Raises DataError when nothing is there, or none may look.
    """
    patience = Patience(DataError)
    asked = partial(patience.answer, url, so_far=lambda: "while its files were listed")
    with asking(url):
        filesystem, inner = open_store(url)
        filesystem.invalidate_cache()
        if is_pattern and not asked(partial(filesystem.exists, inner)):
            base = re.split(r"[*?\[]", url, maxsplit=1)[0].rpartition("/")[0]
            return "pattern", _as_urls(base, filesystem, asked(partial(filesystem.glob, inner)))
        if asked(partial(filesystem.isdir, inner)):
            return "folder", _as_urls(url, filesystem, asked(partial(filesystem.find, inner)))
        asked(partial(filesystem.info, inner))
        return "file", (url,)


def identity(url: str) -> str | None:
    """The identity that the store gives a file's content: hash and size, or else size and time of change; or None."""
    with asking(url):
        filesystem, inner = open_store(url)
        return identity_of(Patience(DataError).answer(url, partial(filesystem.info, inner), so_far=str))


def open_stream(
    url: str, *, clients: Mapping[str, str] = CLIENTS, patience: Patience | None = None
) -> BinaryIO:
    """Open a file for reading. A cut connection is taken up again where it was; a file that changed is an error, and so
    is a store that falls silent. ``patience``: with that store, where others ask it at the same time."""
    return cast(BinaryIO, _Stream(url, clients, patience))


def _as_urls(base: str, filesystem: Any, names: list[str]) -> tuple[str, ...]:
    """Names without a scheme as URLs: fsspec's own way back leaves out the host of hdfs://host/path."""
    start = filesystem._strip_protocol(base).rstrip("/")
    return tuple(sorted(base.rstrip("/") + name[len(start) :] for name in names))


def identity_of(info: dict[str, Any]) -> str | None:
    """Size with a hash, else with the time of the last change; None where the store tells neither."""
    said = {str(key).lower(): value for key, value in info.items() if value not in (None, "")}
    for names in (_HASHES, _TIMES):
        found = [f"{name}={said[name]}" for name in names if name in said]
        if found:
            return f"size={said.get('size')} {found[0]}"
    return None


class _Stream(io.RawIOBase):
    """A file in a store, which goes on where a cut connection left it."""

    def __init__(self, url: str, clients: Mapping[str, str], patience: Patience | None) -> None:
        self._url, self._clients, self._at = url, clients, 0
        self._size: int | None = None
        self._patience = patience or Patience(DataError)
        self._file: Any = None
        with asking(url):
            info = self._patience.answer(url, self._open, so_far=self._so_far)
        self._identity, self._size = identity_of(info), info.get("size")

    def _open(self) -> dict[str, Any]:
        """Open the file as it is now; returns the store's words about it."""
        filesystem, inner = open_store(self._url, self._clients)
        filesystem.invalidate_cache()
        info: dict[str, Any] = filesystem.info(inner)
        self._file = filesystem.open(inner, "rb", block_size=_BLOCK_BYTES)
        return info

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always: stores read from any byte."""
        return True

    def tell(self) -> int:
        """Bytes from the start to where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Raises whatever the store's client raises; only reads are tried again."""
        self._at = self._file.seek(offset, whence)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fewer bytes than there is room for are no end; 0 is. Raises DataError after the last try."""
        block = self._patience.answer(self._url, partial(self._read, len(buffer)), so_far=self._so_far)
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)

    def _read(self, size: int) -> bytes:
        """The next bytes, at most ``size``. Raises DataError when the store still fails after the last try."""
        cause: Exception | None = None
        for wait_s in (0.0, *opening.WAITS_S):
            try:
                if cause is not None:
                    time.sleep(wait_s)
                    self._reopen()
                return bytes(self._file.read(size))
            except (FituneError, MemoryError):
                raise
            except Exception as error:  # clients of stores have no error in common
                cause = error
        assert cause is not None
        raise DataError(
            f"{self._url}: the connection was cut {self._so_far()}, and "
            f"{len(opening.WAITS_S)} tries to go on failed: {cause_of(cause)}",
            hint="run it again when the store answers; nothing half-made is kept",
        )

    def _so_far(self) -> str:
        whole = f" of {format_bytes(self._size)}" if self._size else ""
        return f"after {format_bytes(self._at)}{whole}"

    def _reopen(self) -> None:
        self._file.close()
        if identity_of(self._open()) != self._identity:
            raise DataError(f"{self._url}: the file was changed while it was read", hint="run it again")
        self._file.seek(self._at)

    def close(self) -> None:
        """The store's own file is closed too; a second call does nothing more."""
        if not self.closed:
            self._file.close()
        super().close()


_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of a file."""
_PART_BYTES = 16 * MIB
_READ_BYTES = 4 * MIB
_MD5 = re.compile(r"([0-9a-f]{32})(?:-(\d+))?")


def part_bytes(size: int) -> int:
    """Bytes of each part in which a file of ``size`` is sent; one of less than two parts is sent whole."""
    return max(_PART_BYTES, -(-size // (_MOST_PARTS * MIB)) * MIB)


def etag(file: Path) -> str:
    """The MD5 of a small file; of one sent in parts the MD5 of their MD5s, a dash and their number, as S3 has it.

    Raises OSError.
    """
    size = os.stat(file).st_size
    part = part_bytes(size)
    whole, parts = size if size < 2 * part else part, list[bytes]()
    with open_regular(file) as source:
        for _ in range(-(-size // whole) if size else 1):
            digest, left = hashlib.md5(usedforsecurity=False), whole
            while left and (block := source.read(min(left, _READ_BYTES))):
                digest.update(block)
                left -= len(block)
            parts.append(digest.digest())
    if whole == size:
        return parts[0].hex()
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
