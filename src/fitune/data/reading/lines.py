"""Lines of a file of text, plain or compressed, read as a stream within bounds of memory."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from fitune.data.reading.kinds import Codec
from fitune.data.reading.locations import open_binary
from fitune.data.reading.rows import BadRow
from fitune.errors import DataError
from fitune.units import KIB, MIB, format_bytes

MOST_LINE_BYTES = 16 * MIB
"""Longer lines are a broken file far more often than a row: 16 MiB of text is some four million tokens."""
_BLOCK_BYTES = 64 * KIB
"""Read at once, and between two calls of on_bytes: some 500 short rows."""
BOM = b"\xef\xbb\xbf"
_MAGIC: dict[Codec, bytes] = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_SUFFIX: dict[Codec, str] = {"gzip": ".gz", "zstd": ".zst"}

OnBytes = Callable[[int], None]


@contextmanager
def opened(path: str, codec: Codec, on_bytes: OnBytes) -> Iterator[BinaryIO]:
    """The content of a file, decompressed. ``on_bytes`` is told the bytes of the file itself, and may raise to stop.

    Raises DataError when the file cannot be read, is not compressed as its name says, or is cut off or damaged.
    """
    try:
        with open_binary(path) as file:
            counted = _Counted(file, on_bytes)
            _require_codec(file.read(4), path, codec)
            file.seek(0)
            raw = io.BufferedReader(counted, _BLOCK_BYTES)
            yield raw if codec == "" else io.BufferedReader(_Unpacked(raw, codec, on_bytes), _BLOCK_BYTES)
    except (EOFError, zlib.error) as error:
        raise _damaged(path, codec, error) from None
    except OSError as error:
        if codec and error.errno is None:  # gzip and pyarrow say so of what they cannot unpack
            raise _damaged(path, codec, error) from None
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Counted(io.RawIOBase):
    """A file that tells how much of it was used: a block is told when the next one is asked for."""

    def __init__(self, file: BinaryIO, on_bytes: OnBytes) -> None:
        self._file, self._on_bytes, self._untold = file, on_bytes, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._on_bytes(self._untold)
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        self._untold = len(block)
        return len(block)


class _Unpacked(io.RawIOBase):
    """The content of a compressed stream. ``on_bytes`` is called for every block: a few bytes may stand for GiB."""

    def __init__(self, raw: BinaryIO, codec: Codec, on_bytes: OnBytes) -> None:
        self._on_bytes = on_bytes
        self._stream: Any = gzip.GzipFile(fileobj=raw) if codec == "gzip" else _zstd(raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._on_bytes(0)
        block = self._stream.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)


def _zstd(raw: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


def _require_codec(start: bytes, path: str, codec: Codec) -> None:
    """Say at once what a file is that would otherwise be thousands of bad rows."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        name = path.rpartition("/")[2]
        raise DataError(
            f"{path}: the text is UTF-16, expected UTF-8",
            hint=f"iconv -f utf-16 -t utf-8 {path} > utf8-{name}",
        )
    found = cast(Codec, next((name for name, magic in _MAGIC.items() if start.startswith(magic)), ""))
    if found == codec or not start:
        return
    if codec:
        what = f"is compressed with {found}" if found else f"begins with {start!r}, which is not {codec}"
        plain = path.removesuffix(_SUFFIX[codec])
        raise DataError(
            f"{path}: the name says {codec}, but the file {what}",
            hint=f"rename it to {plain}{_SUFFIX.get(found, '')}",
        )
    raise DataError(
        f"{path}: the file is compressed with {found}, and its name does not say so",
        hint=f"mv {path} {path}{_SUFFIX[found]}",
    )


def _damaged(path: str, codec: Codec, error: Exception) -> DataError:
    cut = isinstance(error, EOFError) or "Truncated" in str(error)
    what = "is cut off in the middle" if cut else "is damaged"
    return DataError(
        f"{path}: the {codec} file {what}: {error}",
        hint="copy or download it again; `gzip -t` or `zstd -t` says whether a file is whole",
    )


class BadLine(bytes):
    """The beginning of a line that is too long to be kept."""


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, the byte order mark taken off; CRLF is left to the caller's strip."""
    number = 0
    while raw := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(raw) > MOST_LINE_BYTES:
            rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MOST_LINE_BYTES)
            raw = BadLine(raw[:64])
        # removeprefix would make plain bytes of a BadLine
        yield number, raw.removeprefix(BOM) if number == 1 and raw.startswith(BOM) else raw


def decode(line: bytes, where: str) -> str:
    """The text of a line. Raises BadRow."""
    if isinstance(line, BadLine):
        limit = format_bytes(MOST_LINE_BYTES)
        raise BadRow(f"{where}: the line is longer than {limit}", reason=f"line longer than {limit}")
    if b"\0" in line:
        raise BadRow(f"{where}: a NUL byte at column {line.index(0) + 1}", reason="NUL byte")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        value = line[error.start]
        raise BadRow(
            f"{where}: not UTF-8: byte 0x{value:02x} at column {error.start + 1}", reason="not UTF-8"
        ) from None
