"""Rows of a file, by the layout that its name tells: lines of JSON, JSON, CSV, text, parquet and arrow.

Text files are read here, line by line, and not by ``datasets``: its readers guess types over a block of rows (the text
"2024-01-01" becomes a date, "007" the number 7.0, "NA" nothing), fill in the fields that other rows have, and end at
the first bad line without naming it. Parquet, arrow and compressed files are read by pyarrow.

A row that cannot be read is a BadRow in its place, so that reading can go on; damage to a file as a whole is raised as
DataError.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from shlex import quote
from typing import Any, BinaryIO, cast

from fitune.data.reading.files import (
    CODECS,
    layout_of,
    open_binary,
)
from fitune.data.reading.rows import NOT_UTF8, TO_UTF8, BadRow, Row, first_doubled
from fitune.errors import DataError
from fitune.units import MIB
from fitune.values.serial import require_shallow

_BOM = b"\xef\xbb\xbf"
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_ROWS_AT_ONCE = 1024
_TOLD_ROWS = 64
"""Rows of a text file between two calls of on_bytes."""

Rows = Iterator[Row | BadRow]


def read_file(path: str, on_bytes: Callable[[int], None]) -> Rows:
    """The rows of one file, read as its name says. Raises DataError when the file cannot be opened or parsed.

    ``on_bytes`` is told the bytes of the file that were read, compressed as they are, and may raise to stop.
    """
    layout, codec = layout_of(path)
    told = 0

    def tell(at: int) -> None:
        """Tells ``on_bytes`` the bytes read since the last call; ``at`` is the place in the file."""
        nonlocal told
        on_bytes(max(0, at - told))
        told = max(told, at)

    with naming(path), open_binary(path) as raw:
        file: Any = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(Any, raw))
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if layout in ("parquet", "arrow"):
            number = 0
            for batch, share in _parquet(file) if layout == "parquet" else _arrow(file, size):
                batch.validate(full=True)  # what a damaged file gives could end this process
                for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for fields in batch.slice(begin, _ROWS_AT_ONCE).to_pylist():
                        number += 1
                        yield Row(f"{path} row {number}", fields)
                tell(int(size * share))
        else:
            _require_codec(file.peek(4)[:4], path, codec)
            for number, row in enumerate(_READERS[layout](_unpacked(file, codec), path)):
                if number % _TOLD_ROWS == 0:
                    tell(file.tell())
                yield row
        tell(size)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Raises DataError, naming the file, in place of what opening, unpacking and parsing it raises."""
    layout, codec = layout_of(path)
    try:
        yield
    except Exception as error:
        # pyarrow's errors by their module: text is read where it is not installed
        if (
            not isinstance(error, OSError | ValueError | MemoryError)
            and "pyarrow" not in type(error).__module__
        ):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        if not codec:
            article = "an" if layout == "arrow" else "a"
            raise DataError(
                f"{path}: not {article} {layout} file: {error or 'it asks for too much memory'}"
            ) from None
        what = "is cut off in the middle" if "Truncated" in str(error) else "is damaged"
        raise DataError(
            f"{path}: the {codec} file {what}: {error}",
            hint="copy or download it again; `gzip -t` or `zstd -t` says whether a file is whole",
        ) from None


def _require_codec(start: bytes, path: str, codec: str) -> None:
    """Say at once what a file is that would otherwise be thousands of bad rows."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        hint = f"iconv -f utf-16 -t utf-8 {quote(path)} > {quote('utf8-' + path.rpartition('/')[2])}"
        raise DataError(f"{path}: the text is UTF-16, expected UTF-8", hint=hint)
    found = next((name for name, magic in _MAGIC.items() if start.startswith(magic)), "")
    if found == codec or not start:
        return
    suffixes = {name: suffix for suffix, name in CODECS.items()}
    name = path.removesuffix(suffixes.get(codec, "")) + suffixes.get(found, "")
    what = f"is compressed with {found}" if found else f"begins with {start!r}, which is not {codec}"
    if codec:
        raise DataError(f"{path}: the name says {codec}, but the file {what}", hint=f"rename it to {name}")
    raise DataError(
        f"{path}: the file {what}, and its name does not say so", hint=f"mv {quote(path)} {quote(name)}"
    )


def _unpacked(file: Any, codec: str) -> Any:
    if not codec:
        return file
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), codec))


def _parquet(file: BinaryIO) -> Iterator[tuple[Any, float]]:
    """Batches, each with the share of the file that is read with it; of fewer rows where rows are long."""
    import pyarrow.parquet

    parquet, done = pyarrow.parquet.ParquetFile(file, pre_buffer=False), 0
    about = parquet.metadata
    of_groups = sum(about.row_group(place).total_byte_size for place in range(about.num_row_groups))
    rows = min(_ROWS_AT_ONCE, 1 + 16 * MIB * about.num_rows // max(of_groups, 1))
    for batch in parquet.iter_batches(batch_size=rows):
        done += batch.num_rows
        yield batch, done / about.num_rows


def _arrow(file: BinaryIO, size: int) -> Iterator[tuple[Any, float]]:
    """The stream format that ``datasets`` writes, or the file format."""
    import pyarrow

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        yield from ((batch, file.tell() / size) for batch in pyarrow.ipc.open_stream(file))
        return
    reader = pyarrow.ipc.open_file(file)
    for place in range(reader.num_record_batches):
        yield reader.get_batch(place), (place + 1) / reader.num_record_batches


def _decoded(raw: bytes, where: str) -> str:
    """The text of a line. Raises BadRow."""
    if b"\0" in raw:
        raise BadRow(f"{where}: a NUL byte at column {raw.index(0) + 1}", reason="NUL byte")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(
            f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}",
            reason=NOT_UTF8,
            hint=TO_UTF8,
        ) from None


class _Objects(json.JSONDecoder):
    """Parses JSON and notes the objects that have a key twice: json keeps the last one and says nothing."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._build)
        self._twice: dict[int, str] = {}

    def decode(self, s: str, *settings: Any) -> Any:
        """Forgets what was noted of the text before."""
        self._twice.clear()
        return super().decode(s, *settings)

    def _build(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            self._twice[id(fields)] = first_doubled(name for name, _ in pairs) or ""
        return fields

    def row(self, value: Any, where: str) -> Row | BadRow:
        """The row that a parsed value is; an error for one that is none."""
        try:
            require_shallow(value)  # else a message about it could not be printed
        except ValueError as error:
            return BadRow(f"{where}: {error}", reason="nested too deeply")
        if self._twice and (key := self._key_twice_in(value)) is not None:
            return BadRow(f"{where}: the key {key!r} is there twice in one object", reason="key twice")
        if not isinstance(value, dict):
            found = type(value).__name__
            return BadRow(
                f"{where}: a row is an object with named fields, found {found}", reason="not an object"
            )
        return Row(where, value)

    def _key_twice_in(self, value: Any) -> str | None:
        if (key := self._twice.get(id(value))) is not None:
            return key
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return next((twice for item in inner if (twice := self._key_twice_in(item)) is not None), None)


def _cause(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _read_jsonl(file: BinaryIO, path: str) -> Rows:
    objects = _Objects()
    for number, raw in enumerate(file, start=1):
        if not (line := (raw.removeprefix(_BOM) if number == 1 else raw).strip()):
            continue
        where = f"{path}:{number}"
        try:
            text = _decoded(line, where)
            yield objects.row(objects.decode(text), where)
        except BadRow as bad:
            yield bad
        except (ValueError, RecursionError) as error:
            if raw.endswith(b"\n"):
                yield BadRow(f"{where}: not JSON: {_cause(error)}", reason="not JSON")
            else:
                tail = f"…{text[-40:]!r}" if len(text) > 40 else repr(text)
                said = f"{where}: the file ends in the middle of a row: {tail}"
                yield BadRow(said, reason="torn last line")


def _read_json(file: BinaryIO, path: str) -> Rows:
    """A list of rows, or ``{"data": [...]}``. JSON lines under this suffix are read as what they are."""
    raw = file.read().removeprefix(_BOM)
    objects = _Objects()
    try:
        value = objects.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}") from None
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data" and raw.lstrip().startswith(b"{"):
            yield from _read_jsonl(io.BytesIO(raw), path)
            return
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else path
        raise DataError(f"{where}: not JSON: {_cause(error)}") from None
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError(f'{path}: expected a list of rows or {{"data": [...]}}, found {type(value).__name__}')
    for number, each in enumerate(value, start=1):
        yield objects.row(each, f"{path} row {number}")


def _read_csv(file: BinaryIO, path: str) -> Rows:
    """Records below a header, which says what parts its columns: the first of comma, semicolon and tab that does."""
    csv.field_size_limit(2**31 - 1)
    text, head = _text_lines(file), list[str]()

    def from_the_start() -> Iterator[str]:
        """Lines from the first one, each time it is called; ``head`` keeps those already read."""
        yield from head[:]
        for line in text:
            head.append(line)
            yield line

    header: list[str] = []
    mark, used, problem = ",", 0, None
    for other in ",;\t":
        try:
            columns = next(begun := csv.reader(from_the_start(), strict=True, delimiter=other), [])
        except csv.Error as error:
            problem = problem or error  # a quoted name ends before another mark
            continue
        if not header or len(columns) > 1:
            header, mark, used = columns, other, begun.line_num
        if len(header) != 1:
            break
    if problem and not header:
        raise DataError(f"{path}:1: not CSV: {problem}")
    for name in header:
        _decoded(name.encode("utf-8", "surrogateescape"), f"{path}:1")
    if len(header) == 1 and "|" in header[0]:
        raise DataError(
            f"{path}:1: the header is one column, {header[0]!r}: columns are separated by commas, semicolons or "
            "tabs, not by '|'",
            hint="save the file with commas, or as JSON lines",
        )
    if (doubled := first_doubled(header)) is not None:
        raise DataError(f"{path}:1: two columns are named {doubled!r}")
    reader = csv.reader(chain(head[used:], text), strict=True, delimiter=mark)
    while True:
        first = used + reader.line_num + 1
        where = f"{path}:{first}"
        try:
            values = next(reader)
            _decoded(",".join(values).encode("utf-8", "surrogateescape"), where)
            if values and len(values) != len(header):
                said = f"{where}: {len(values)} fields, the header names {len(header)}"
                yield BadRow(said, reason="wrong number of fields")
            elif values:
                yield Row(where, dict(zip(header, values, strict=True)))
        except StopIteration:
            return
        except BadRow as bad:
            yield bad
        except csv.Error as error:
            if "unexpected end" not in str(error):
                yield BadRow(f"{where}: not CSV: {error}", reason="not CSV")
                continue
            lost = used + reader.line_num + 1 - first
            yield BadRow(
                f"{where}: a quote opens in this row and is never closed: {lost} lines to the end of the file are lost",
                reason=f"quote never closed ({lost} lines lost)",
            )


def _text_lines(file: BinaryIO) -> Iterator[str]:
    """Lines for csv.reader, with surrogates for bytes that are no text: it must not end in the middle of a record."""
    for number, raw in enumerate(file, start=1):
        yield (raw.removeprefix(_BOM) if number == 1 else raw).decode("utf-8", "surrogateescape")


def _read_text(file: BinaryIO, path: str) -> Rows:
    """A text file is one document, and one row."""
    try:
        yield Row(path, {"text": _decoded(file.read().removeprefix(_BOM), path)})
    except BadRow as bad:
        yield bad


_READERS: dict[str, Callable[[BinaryIO, str], Rows]] = {
    "jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "text": _read_text,
}  # fmt: skip
