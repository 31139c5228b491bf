"""Rows of CSV and TSV files: a header, then records parted by commas, semicolons or tabs."""

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO

from fitune.data.reading import lines
from fitune.data.reading.lines import BadLine, decode, numbered_lines
from fitune.data.reading.rows import BadRow, Row, first_doubled
from fitune.errors import DataError
from fitune.units import format_bytes

_MARKS = ",;\t"


def read_separated(file: BinaryIO, path: str) -> Iterator[Row | BadRow]:
    """The rows of a file. The header says what parts its columns: the first of comma, semicolon and tab that does.

    Raises DataError for a header that names no columns, or one column twice.
    """
    csv.field_size_limit(lines.MOST_LINE_BYTES)
    text = _TextLines(file, path)
    header, mark = _header(text, path)
    reader = csv.reader(text, strict=True, delimiter=mark)
    while True:
        text.begin_record()
        first = text.number + 1
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
            yield _bad_record(error, where, first=first, last=text.number)


class _TextLines:
    """Decoded lines for csv.reader. An iterator, not a generator: it goes on after it raised BadRow."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._lines, self._path, self.number = numbered_lines(file), path, 0
        self.begin_record()

    def begin_record(self) -> None:
        """Begin a record: a quoted field may go over many lines."""
        self._record_bytes, self._first = 0, self.number + 1

    def __iter__(self) -> "_TextLines":
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._lines)
        self._record_bytes += len(raw)
        if self._record_bytes > lines.MOST_LINE_BYTES and not isinstance(raw, BadLine):
            limit = format_bytes(lines.MOST_LINE_BYTES)
            raise BadRow(
                f"{self._path}:{self._first}: the record is longer than {limit}",
                reason=f"record longer than {limit}",
            )
        return decode(raw, f"{self._path}:{self.number}")


class _Kept:
    """Lines that are handed on and kept: a header is read once for each mark that may part its columns."""

    def __init__(self, text: _TextLines) -> None:
        self._text = text
        self.seen: list[str] = []

    def __iter__(self) -> "_Kept":
        return self

    def __next__(self) -> str:
        self.seen.append(next(self._text))
        return self.seen[-1]


def _header(text: _TextLines, path: str) -> tuple[list[str], str]:
    """The names of the columns, and what stands between them."""
    kept = _Kept(text)
    header = _first_record(kept, ",", path)
    mark = ","
    for other in _MARKS[1:]:
        if len(header) > 1:
            break
        columns = _first_record(iter(kept.seen), other, path)
        if len(columns) > 1:
            header, mark = columns, other
    if len(header) == 1 and "|" in header[0]:
        raise DataError(
            f"{path}:1: the header is one column, {header[0]!r}: columns are separated by commas, semicolons or "
            "tabs, not by '|'",
            hint="save the file with commas, or as JSON lines",
        )
    if (doubled := first_doubled(header)) is not None:
        raise DataError(f"{path}:1: two columns are named {doubled!r}")
    return header, mark


def _first_record(text: Iterator[str] | _Kept, mark: str, path: str) -> list[str]:
    try:
        return next(csv.reader(text, strict=True, delimiter=mark), [])
    except csv.Error as error:
        raise DataError(f"{path}:1: not CSV: {error}") from None


def _bad_record(error: csv.Error, where: str, *, first: int, last: int) -> BadRow:
    if "unexpected end" not in str(error):
        return BadRow(f"{where}: not CSV: {error}", reason="not CSV")
    lost = last - first + 1
    return BadRow(
        f"{where}: a quote opens in this row and is never closed: {lost} lines to the end of the file are lost",
        reason=f"quote never closed ({lost} lines lost)",
    )


def _record(header: list[str], values: list[str], where: str) -> dict[str, Any]:
    if len(values) != len(header):
        raise BadRow(
            f"{where}: {len(values)} fields, the header names {len(header)}", reason="wrong number of fields"
        )
    return dict(zip(header, values, strict=True))
