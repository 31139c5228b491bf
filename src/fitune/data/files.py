"""Readers of single files. Each yields rows, and BadRow values in the place of rows that cannot be read.

A bad row is yielded, not raised, so that reading can go on when the user asked to skip such rows.
Damage to the file as a whole is raised as DataError.
"""

import csv
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fitune.data.arrow import ARROW_SUFFIXES, read_arrow
from fitune.data.locations import open_binary
from fitune.data.rows import BadRow, Row
from fitune.errors import DataError
from fitune.spec.serial import require_shallow
from fitune.units import KIB, MIB, format_bytes

MAX_LINE_BYTES = 16 * MIB
"""Longer lines are a broken file far more often than a row: 16 MiB of text is some four million tokens."""
_MAX_JSON_BYTES = 256 * MIB
"""Largest file that is one JSON value: it is parsed whole, which takes some ten times its size."""
_TOLD_BYTES = 64 * KIB
"""Between two calls of on_bytes: some 500 short rows."""

_BOM = b"\xef\xbb\xbf"

Rows = Iterator[Row | BadRow]


def read_file(path: str, on_bytes: Callable[[int], None] = lambda _count: None) -> Rows:
    """The rows of one file, read as its suffix says. Raises DataError when the file cannot be opened or parsed.

    ``on_bytes`` is told what was read, and may raise to stop.
    """
    suffix = path.lower().rsplit(".", 1)[-1]
    if suffix in ARROW_SUFFIXES:
        yield from read_arrow(path, on_bytes)
        return
    try:
        with open_binary(path) as file:
            _refuse_other_encodings(file, path)
            yield from _READERS[suffix](_Watched(file, on_bytes), path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Watched:
    """A file that tells how much of it was read, also where that gives no row for long."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes, self._untold = file, on_bytes, 0

    def readline(self, limit: int) -> bytes:
        return self._counted(self._file.readline(limit))

    def read(self, limit: int) -> bytes:
        return self._counted(self._file.read(limit))

    def rewind(self) -> None:
        self._file.seek(0)

    def _counted(self, data: bytes) -> bytes:
        self._untold += len(data)
        if self._untold >= _TOLD_BYTES or not data:
            self._on_bytes(self._untold)
            self._untold = 0
        return data


def _refuse_other_encodings(file: BinaryIO, path: str) -> None:
    """Say at once what a file is that would otherwise be thousands of bad rows."""
    start = file.read(2)
    file.seek(0)
    if start in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(
            f"{path}: the text is UTF-16, expected UTF-8",
            hint=f"iconv -f utf-16 -t utf-8 {path} > utf8-{_name(path)}",
        )
    if start == b"\x1f\x8b":
        raise DataError(
            f"{path}: the file is compressed with gzip", hint=f"gunzip -c {path} > plain-{_name(path)}"
        )


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _read_jsonl(file: _Watched, path: str) -> Rows:
    objects = _Objects()
    for number, raw in _numbered_lines(file):
        where = f"{path}:{number}"
        line = raw if isinstance(raw, BadLine) else raw.strip()
        if not line:
            continue
        try:
            text = _decode(line, where)
            yield Row(where, _parse_object(objects, text, where, torn=not raw.endswith(b"\n")))
        except BadRow as bad:
            yield bad


class BadLine(bytes):
    """The beginning of a line that is too long to be kept."""


def _numbered_lines(file: _Watched) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, the byte order mark taken off; CRLF is left to the caller's strip."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
            raw = BadLine(raw[:64])
        # removeprefix would make plain bytes of a BadLine
        yield number, raw.removeprefix(_BOM) if number == 1 and raw.startswith(_BOM) else raw


def _decode(line: bytes, where: str) -> str:
    if isinstance(line, BadLine):
        limit = format_bytes(MAX_LINE_BYTES)
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


def _parse_object(objects: "_Objects", text: str, where: str, *, torn: bool) -> dict[str, Any]:
    try:
        value = objects.parse(text)
    except (ValueError, RecursionError) as error:
        if torn:
            raise BadRow(
                f"{where}: the file ends in the middle of a row: {_tail(text)}", reason="torn last line"
            ) from None
        raise BadRow(f"{where}: not JSON: {_cause(error)}", reason="not JSON") from None
    _require_flat(value, where)
    if objects.doubled:
        raise _key_twice(where, objects.doubled[0][1])
    return _require_object(value, where)


def _require_flat(value: Any, where: str) -> None:
    """Refuse values nested so deeply that a message about them could not be printed."""
    try:
        require_shallow(value)
    except ValueError as error:
        raise BadRow(f"{where}: {error}", reason="nested too deeply") from None


class _Objects:
    """Parses JSON and notes the objects that have a key twice: json keeps the last one and says nothing."""

    def __init__(self) -> None:
        self.doubled: list[tuple[dict[str, Any], str]] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._build)

    def parse(self, text: str) -> Any:
        self.doubled = []
        return self._decoder.decode(text)

    def _build(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            names = [name for name, _ in pairs]
            self.doubled.append((fields, next(name for name in names if names.count(name) > 1)))
        return fields

    def key_twice_in(self, value: Any) -> str | None:
        """The key that stands twice in ``value`` or in anything it holds."""
        for fields, key in self.doubled:
            if fields is value:
                return key
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return next((twice for item in inner if (twice := self.key_twice_in(item)) is not None), None)


def _key_twice(where: str, key: str) -> BadRow:
    return BadRow(f"{where}: the key {key!r} is there twice in one object", reason="key twice")


def _require_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        found = type(value).__name__
        raise BadRow(f"{where}: a row is an object with named fields, found {found}", reason="not an object")
    return value


def _cause(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _tail(text: str) -> str:
    return f"…{text[-40:]!r}" if len(text) > 40 else repr(text)


def _read_json(file: _Watched, path: str) -> Rows:
    """A list of rows, or ``{"data": [...]}``. JSON lines under this suffix are read as what they are."""
    text, objects = _whole_text(file, path), _Objects()
    try:
        value = objects.parse(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            file.rewind()
            yield from _read_jsonl(file, path)
            return
        raise DataError(f"{path}:{error.lineno}: not JSON: {_cause(error)}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {_cause(error)}") from None
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(f'{path}: expected a list of rows or {{"data": [...]}}, found {type(value).__name__}')
    for row in _numbered_objects(value, path):
        twice = objects.key_twice_in(row.fields) if objects.doubled and isinstance(row, Row) else None
        yield _key_twice(row.where, twice) if twice is not None and isinstance(row, Row) else row


def _whole_text(file: _Watched, path: str) -> str:
    raw = file.read(_MAX_JSON_BYTES + 1)
    if len(raw) > _MAX_JSON_BYTES:
        raise DataError(
            f"{path}: larger than {format_bytes(_MAX_JSON_BYTES)}, and a .json file is parsed whole",
            hint=f"jq -c '.[]' {path} > {path}l; a .jsonl file is read row by row, however long it is",
        )
    raw = raw.removeprefix(_BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None


def _numbered_objects(values: list[Any], path: str) -> Rows:
    for number, value in enumerate(values, start=1):
        where = f"{path} row {number}"
        try:
            _require_flat(value, where)
            yield Row(where, _require_object(value, where))
        except BadRow as bad:
            yield bad


class _TextLines:
    """Decoded lines for csv.reader. An iterator, not a generator: it goes on after it raised BadRow."""

    def __init__(self, file: _Watched, path: str) -> None:
        self._lines, self._path, self.number = _numbered_lines(file), path, 0
        self.begin_record()

    def begin_record(self) -> None:
        """Begin a record: a quoted field may go over many lines."""
        self._record_bytes, self._first = 0, self.number + 1

    def __iter__(self) -> "_TextLines":
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._lines)
        self._record_bytes += len(raw)
        if self._record_bytes > MAX_LINE_BYTES and not isinstance(raw, BadLine):
            limit = format_bytes(MAX_LINE_BYTES)
            raise BadRow(
                f"{self._path}:{self._first}: the record is longer than {limit}",
                reason=f"record longer than {limit}",
            )
        return _decode(raw, f"{self._path}:{self.number}")


def _read_csv(file: _Watched, path: str) -> Rows:
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _TextLines(file, path)
    reader = csv.reader(lines, strict=True)
    header = _header(reader, path)
    while True:
        lines.begin_record()
        first = lines.number + 1
        where = f"{path}:{first}"
        try:
            values = next(reader, None)
            if values is None:
                return
            if values:
                yield Row(where, _record(header, values, where))
        except BadRow as bad:
            yield bad
        except csv.Error as error:
            yield _bad_record(error, where, first=first, last=lines.number)


def _bad_record(error: csv.Error, where: str, *, first: int, last: int) -> BadRow:
    if "unexpected end" not in str(error):
        return BadRow(f"{where}: not CSV: {error}", reason="not CSV")
    lost = last - first + 1
    return BadRow(
        f"{where}: a quote opens in this row and is never closed: {lost} lines to the end of the file are lost",
        reason=f"quote never closed ({lost} lines lost)",
    )


def _header(reader: Any, path: str) -> list[str]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{path}:1: not CSV: {error}") from None
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), "")):
        raise DataError(
            f"{path}:1: the header is one column, {header[0]!r}: fitune reads columns parted by commas, not {other!r}",
            hint="save the file with commas, or as JSON lines",
        )
    doubled = [name for name in header if header.count(name) > 1]
    if doubled:
        raise DataError(f"{path}:1: two columns are named {doubled[0]!r}")
    return header


def _record(header: list[str], values: list[str], where: str) -> dict[str, Any]:
    if len(values) != len(header):
        raise BadRow(
            f"{where}: {len(values)} fields, the header names {len(header)}", reason="wrong number of fields"
        )
    return dict(zip(header, values, strict=True))


_READERS: dict[str, Callable[[_Watched, str], Rows]] = {
    "jsonl": _read_jsonl,
    "ndjson": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
}
