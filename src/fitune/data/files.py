"""Readers of single files. Each yields rows, and BadRow values in the place of rows that cannot be read.

A bad row is yielded, not raised, so that reading can go on when the user asked to skip such rows.
Damage to the file as a whole is raised as DataError.
"""

import csv
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fitune.data.locations import open_binary
from fitune.data.rows import BadRow, Row
from fitune.errors import DataError
from fitune.units import format_bytes

MAX_LINE_BYTES = 16 * 1024**2
"""Longer lines are a broken file far more often than a row: 16 MiB of text is some four million tokens."""

_BOM = b"\xef\xbb\xbf"

Rows = Iterator[Row | BadRow]


def read_file(path: str) -> Rows:
    """The rows of one file, read as its suffix says. Raises DataError when the file cannot be opened or parsed."""
    suffix = path.lower().rsplit(".", 1)[-1]
    with open_binary(path) as file:
        if suffix not in _BINARY:
            _refuse_other_encodings(file, path)
        yield from _READERS[suffix](file, path)


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


def _read_jsonl(file: BinaryIO, path: str) -> Rows:
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


def _numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
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
    if objects.doubled:
        raise _key_twice(where, objects.doubled[0][1])
    return _require_object(value, where)


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
        return next((key for item in inner if (key := self.key_twice_in(item)) is not None), None)


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


def _read_json(file: BinaryIO, path: str) -> Rows:
    """A list of rows, or ``{"data": [...]}``. JSON lines under this suffix are read as what they are."""
    text, objects = _whole_text(file, path), _Objects()
    try:
        value = objects.parse(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            file.seek(0)
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
        key = objects.key_twice_in(row.fields) if objects.doubled and isinstance(row, Row) else None
        yield row if key is None else _key_twice(row.where, key)


def _whole_text(file: BinaryIO, path: str) -> str:
    raw = file.read().removeprefix(_BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None


def _numbered_objects(values: list[Any], path: str, *, start: int = 1) -> Rows:
    for number, value in enumerate(values, start=start):
        where = f"{path} row {number}"
        try:
            yield Row(where, _require_object(value, where))
        except BadRow as bad:
            yield bad


class _TextLines:
    """Decoded lines for csv.reader. An iterator, not a generator: it goes on after it raised BadRow."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._lines, self._path, self.number = _numbered_lines(file), path, 0

    def __iter__(self) -> "_TextLines":
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._lines)
        return _decode(raw, f"{self._path}:{self.number}")


def _read_csv(file: BinaryIO, path: str) -> Rows:
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _TextLines(file, path)
    reader = csv.reader(lines, strict=True)
    header = _header(reader, path)
    while True:
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
        header = next(reader, [])
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


def _read_parquet(file: BinaryIO, path: str) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from _arrow_rows(pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file: {error}") from None


def _read_arrow(file: BinaryIO, path: str) -> Rows:
    """The stream format that ``datasets`` writes, or the file format."""
    import pyarrow

    try:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            file.seek(0)
            batches = pyarrow.ipc.open_stream(file)
        yield from _arrow_rows(batches, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not an arrow file: {error}") from None


def _arrow_rows(batches: Any, path: str) -> Rows:
    start = 1
    for batch in batches:
        yield from _numbered_objects(batch.to_pylist(), path, start=start)
        start += batch.num_rows


_BINARY = ("parquet", "arrow")

_READERS: dict[str, Callable[[BinaryIO, str], Rows]] = {
    "jsonl": _read_jsonl,
    "ndjson": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
