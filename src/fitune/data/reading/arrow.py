"""Parquet and arrow files, read by another process within bounds of memory.

A few hundred bytes of these formats can stand for any amount of memory, and what a damaged file does to their reader
(C++) cannot be caught: it aborts. There it ends a process that has nothing to lose.
"""

import json
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fitune.data.children import Child, ChildEnded, requests
from fitune.data.reading.locations import open_binary
from fitune.data.reading.rows import BadRow, Row, from_message, to_message
from fitune.errors import DataError
from fitune.units import GIB, MIB, format_bytes

_MEMORY, _MOST_MEMORY = GIB, 8 * GIB
"""Address space for the reader beyond what it has when it begins: so much, and twice the file, but not more than the
second. A batch in an arrow file is as large as it was written."""
_MOST_ROW_BYTES = 16 * MIB
"""As much as a line may have."""
_MESSAGE_BYTES = 4 * MIB
_BATCH_ROWS = 1024

_HINT = "write the file anew with fewer rows in a row group, or as .jsonl"

_ROWS, _TOO_LONG, _FAILED, _END = b"R", b"L", b"F", b"."
"""First byte of every message of the reader."""


def read_arrow(path: str, on_bytes: Callable[[int], None]) -> Iterator[Row | BadRow]:
    """The rows of a file. ``on_bytes`` is called while they are waited for, and may raise to stop.

    Raises DataError when it cannot be read, or not within the memory that a reader may have.
    """
    import pyarrow

    child = Child("fitune.data.reading.arrow", beat=lambda: on_bytes(0))
    number = 0
    try:
        child.send(path.encode("utf-8", "surrogateescape"))
        while (message := child.receive())[:1] != _END:
            kind, content = message[:1], message[1:]
            if kind == _FAILED:
                raise from_message(**json.loads(content))
            if kind == _TOO_LONG:
                number += 1
                limit = format_bytes(_MOST_ROW_BYTES)
                yield BadRow(
                    f"{path} row {number}: the row is longer than {limit}", reason=f"row longer than {limit}"
                )
                continue
            on_bytes(int.from_bytes(content[:8], "little"))
            for fields in pyarrow.ipc.open_stream(content[8:]).read_all().to_pylist():
                number += 1
                yield Row(f"{path} row {number}", fields)
    except ChildEnded as ended:
        raise DataError(
            f"{path}: the reader of the file ended with {ended.how} after row {number:,}: the file is damaged, or a "
            "batch of its rows needs more memory than the reader may have",
            hint=_HINT,
        ) from None
    finally:
        child.close()


def main() -> None:
    """Main function of the other process: receives one path, sends messages back."""
    import pyarrow

    connection, request = next(requests(sys.argv))
    path = request.decode("utf-8", "surrogateescape")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open_binary(path) as file:
            size = file.seek(0, 2)
            room = min(_MEMORY + 2 * size, _MOST_MEMORY)
            limit = _address_space() + room
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            for message in _messages(file, size, is_parquet=path.lower().endswith("parquet")):
                connection.send_bytes(message)
    except DataError as error:
        connection.send_bytes(_failed(error))
    except MemoryError:
        needs = f"{path}: a batch of its rows needs more than {format_bytes(room)}"
        connection.send_bytes(_failed(DataError(needs, hint=_HINT)))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        kind = "a parquet" if path.lower().endswith("parquet") else "an arrow"
        connection.send_bytes(_failed(DataError(f"{path}: not {kind} file: {error}")))
    connection.send_bytes(_END)


def _failed(error: DataError) -> bytes:
    return _FAILED + json.dumps(to_message(error)).encode()


def _address_space() -> int:
    """Bytes that this process has mapped (man 5 proc)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _messages(file: BinaryIO, size: int, *, is_parquet: bool) -> Iterator[bytes]:
    file.seek(0)
    told = 0
    for batch, share in _parquet_batches(file) if is_parquet else _arrow_batches(file, size):
        for message in _within_bounds(_without_dictionaries(batch)):
            read = max(told, int(size * share))
            yield message if message == _TOO_LONG else _ROWS + (read - told).to_bytes(8, "little") + message
            told = read


def _parquet_batches(file: BinaryIO) -> Iterator[tuple[Any, float]]:
    """Batches, each with the share of the file that is read with it."""
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(file, buffer_size=MIB, pre_buffer=False)
    groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    row_bytes = max((g.total_byte_size / max(g.num_rows, 1) for g in groups), default=1)
    rows = max(1, min(_BATCH_ROWS, int(_MOST_ROW_BYTES / max(row_bytes, 1))))
    done = 0
    for batch in parquet.iter_batches(batch_size=rows, use_threads=False):
        done += batch.num_rows
        yield batch, min(1.0, done / max(parquet.metadata.num_rows, 1))


def _arrow_batches(file: BinaryIO, size: int) -> Iterator[tuple[Any, float]]:
    """The stream format that ``datasets`` writes, or the file format."""
    import pyarrow

    if file.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(file)
        for place in range(reader.num_record_batches):
            yield reader.get_batch(place), (place + 1) / reader.num_record_batches
        return
    file.seek(0)
    for batch in pyarrow.ipc.open_stream(file):
        yield batch, file.tell() / size


def _without_dictionaries(batch: Any) -> Any:
    import pyarrow

    if not any(pyarrow.types.is_dictionary(field.type) for field in batch.schema):
        return batch
    columns = [c.dictionary_decode() if pyarrow.types.is_dictionary(c.type) else c for c in batch.columns]
    return pyarrow.record_batch(columns, names=batch.schema.names)


def _within_bounds(batch: Any) -> Iterator[bytes]:
    """The batch as messages of bounded size, one row at least."""
    import pyarrow

    if batch.num_rows == 0:
        return
    if batch.nbytes > _MOST_ROW_BYTES and batch.num_rows == 1:
        yield _TOO_LONG
    elif batch.nbytes > _MESSAGE_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _within_bounds(batch.slice(0, half))
        yield from _within_bounds(batch.slice(half))
    else:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield sink.getvalue().to_pybytes()


if __name__ == "__main__":
    main()
