"""Readers of single files. Each yields rows, and BadRow values in the place of rows that cannot be read.

A bad row is yielded, not raised, so that reading can go on when the user asked to skip such rows.
Damage to the file as a whole is raised as DataError.
"""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fitune.data.reading.arrow import read_arrow
from fitune.data.reading.kinds import require_readable
from fitune.data.reading.lines import BOM, MOST_LINE_BYTES, BadLine, decode, numbered_lines, opened
from fitune.data.reading.rows import BadRow, Row, first_doubled
from fitune.data.reading.separated import read_separated
from fitune.errors import DataError
from fitune.spec.serial import require_shallow
from fitune.units import MIB, format_bytes

_MOST_JSON_BYTES = 256 * MIB
"""Largest file that is one JSON value: it is parsed whole, which takes some ten times its size."""
Rows = Iterator[Row | BadRow]


def read_file(path: str, on_bytes: Callable[[int], None]) -> Rows:
    """The rows of one file, read as its name says. Raises DataError when the file cannot be opened or parsed.

    ``on_bytes`` is told what was read, and may raise to stop.
    """
    kind = require_readable(path)
    if kind.layout in ("parquet", "arrow"):
        yield from read_arrow(path, on_bytes)
        return
    with opened(path, kind.codec, on_bytes) as file:
        yield from _READERS[kind.layout](file, path)


def _read_jsonl(file: BinaryIO, path: str) -> Rows:
    objects = _Objects()
    for number, raw in numbered_lines(file):
        where = f"{path}:{number}"
        line = raw if isinstance(raw, BadLine) else raw.strip()
        if not line:
            continue
        try:
            text = decode(line, where)
            yield Row(where, _parse_object(objects, text, where, torn=not raw.endswith(b"\n")))
        except BadRow as bad:
            yield bad


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
            self.doubled.append((fields, first_doubled(name for name, _ in pairs) or ""))
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


def _read_json(file: BinaryIO, path: str) -> Rows:
    """A list of rows, or ``{"data": [...]}``. JSON lines under this suffix are read as what they are."""
    text, objects = _whole_text(file, path), _Objects()
    try:
        value = objects.parse(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(io.BytesIO(text.encode()), path)
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


def _whole_text(file: BinaryIO, path: str) -> str:
    raw = file.read(_MOST_JSON_BYTES + 1)
    if len(raw) > _MOST_JSON_BYTES:
        raise DataError(
            f"{path}: larger than {format_bytes(_MOST_JSON_BYTES)}, and a .json file is parsed whole",
            hint=f"jq -c '.[]' {path} > {path}l; a .jsonl file is read row by row, however long it is",
        )
    raw = raw.removeprefix(BOM)
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


def _read_text(file: BinaryIO, path: str) -> Rows:
    """A text file is one document, and one row."""
    raw = file.read(MOST_LINE_BYTES + 1)
    limit = format_bytes(MOST_LINE_BYTES)
    if len(raw) > MOST_LINE_BYTES:
        yield BadRow(
            f"{path}: a text file is one row, and this one is longer than {limit}",
            reason=f"text longer than {limit}",
            hint="divide it into files of one document each, or write the documents as JSON lines {text}",
        )
        return
    try:
        yield Row(path, {"text": decode(raw.removeprefix(BOM), path)})
    except BadRow as bad:
        yield bad


_READERS: dict[str, Callable[[BinaryIO, str], Rows]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": read_separated,
    "text": _read_text,
}
