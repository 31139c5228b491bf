"""Damaged files and values nested without an end."""

import pytest

from fitune.data.reading.sources import read_rows
from fitune.errors import DataError
from fitune.spec.plan import DataSource


def read(path, *, on_bad_row="error"):
    counted = []
    rows = list(read_rows(DataSource(path=str(path)), on_bad_row=on_bad_row, count_bad=counted.append))
    return rows, counted


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"PAR1" + bytes(100) + b"PAR1"])
def test_damaged_files_are_errors_that_name_them(tmp_path, suffix, content):
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"rows.{suffix}: "):
        read(file)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_no_wrong_byte_ends_the_process_or_raises_anything_else(tmp_path, suffix):
    """Arrow's reader trusts the offsets in a file: the first row of one of these was a segmentation fault."""
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / f"rows.{suffix}"
    table = pyarrow.Table.from_pylist([{"text": f"row {i} é", "l": [{"k": "v"}]} for i in range(10)])
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    good, refused = file.read_bytes(), 0
    for place in range(4, len(good), max(1, len(good) // 200)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        try:
            read(file, on_bad_row="skip")
        except DataError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("levels", [70, 400, 900, 100_000])
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_row_nested_deeply_is_named_or_counted(tmp_path, levels, suffix):
    deep = '{"prompt": ' + '[{"a":' * (levels // 2) + "1" + "}]" * (levels // 2) + ', "completion": "x"}'
    file = tmp_path / f"rows.{suffix}"
    good = '{"prompt": "a", "completion": "b"}'
    file.write_text(f"{good}\n{deep}\n{good}\n" if suffix == "jsonl" else f"[{good}, {deep}, {good}]")
    with pytest.raises(DataError, match=r"nested"):
        read(file)
    if suffix == "jsonl" or levels < 500:
        rows, counted = read(file, on_bad_row="skip")
        assert len(rows) == 2
        assert len(counted) == 1
