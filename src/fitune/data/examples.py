"""The rows of a source as examples, and what of each is kept: one reader for training, for a plan's first rows and for
the view of the data."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from fitune.data.conversations.formats import detect_format, to_example
from fitune.data.conversations.messages import Example
from fitune.data.reading.rows import BadRow, Row
from fitune.data.reading.sources import ignore, rows_of
from fitune.values.plan import DataFormat, DataPlan, DataSource


class SourceRow(NamedTuple):
    """A row of a source, and the example that it becomes, or the error that says why it cannot be used."""

    row: Row | BadRow
    example: Example | BadRow
    format: DataFormat
    """The one that the whole source is read as: ``auto`` is that of its first row which can be read."""


def examples_of(source: DataSource, *, on_bytes: Callable[[int], None] = ignore) -> Iterator[SourceRow]:
    """Every row of the source, in order. ``on_bytes`` is told what was read, and may raise to stop.

    Raises DataError where the source as a whole cannot be used: it is not there, its file is damaged, its first row has
    no known format, or it is preference data.
    """
    format = source.format
    for row in rows_of(source, on_bytes=on_bytes):
        example: Example | BadRow
        if isinstance(row, BadRow):
            example = row
        else:
            if format == "auto":
                format = detect_format(row, source.columns)
            try:
                example = to_example(row, format=format, columns=source.columns)
            except BadRow as bad:
                example = bad
        yield SourceRow(row, example, format)


def kept_parts(length: int, data: DataPlan, *, seq_len: int) -> list[tuple[int, int]]:
    """The stretches of a row of ``length`` tokens that become rows, as ``on_long_row`` says."""
    if length > seq_len and data.on_long_row == "drop":
        return []
    if length > seq_len and data.on_long_row == "split":
        return [(begin, min(begin + seq_len, length)) for begin in range(0, length, seq_len)]
    return [(0, min(length, seq_len))]
