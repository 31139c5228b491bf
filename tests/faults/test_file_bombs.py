"""A few bytes that stand for gigabytes, records without an end, and values nested without an end."""

import contextlib
import gzip
import json
import resource
import zipfile

import pytest

from fitune.data.reading import files, lines
from fitune.data.reading.rows import BadRow
from fitune.data.reading.sources import read_rows
from fitune.errors import DataError
from fitune.spec.plan import DataSource
from fitune.units import MIB


def read(path, *, on_bad_row="error"):
    counted = []
    rows = list(read_rows(DataSource(path=str(path)), on_bad_row=on_bad_row, count_bad=counted.append))
    return rows, counted


def write_parquet(path, rows, **settings):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **settings)


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_a_parquet_file_of_a_few_kilobytes_that_stands_for_20_gb_is_refused(tmp_path, is_dictionary):
    """One text of 20 MB that 1,000 rows repeat. This process takes none of it, and goes on."""
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "bomb.parquet"
    texts = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1000, pyarrow.int32()), ["a" * (20 * MIB)]
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), file, compression="zstd", store_schema=is_dictionary
    )
    assert file.stat().st_size < 100_000
    del texts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"bomb.parquet: .*needs more than 1.00 GiB") as caught:
        read(file)
    assert "row group" in caught.value.hint
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_row_of_a_parquet_file_that_is_too_long_is_named_or_counted(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    write_parquet(file, [{"text": "a"}, {"text": "b" * (17 * MIB)}, {"text": "c"}])
    with pytest.raises(BadRow, match=r"rows.parquet row 2: the row is longer than 16.0 MiB"):
        read(file)
    rows, counted = read(file, on_bad_row="skip")
    assert [(row.fields["text"], row.where) for row in rows] == [
        ("a", f"{file} row 1"),
        ("c", f"{file} row 3"),
    ]
    assert counted == ["row longer than 16.0 MiB"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"PAR1" + bytes(100) + b"PAR1"])
def test_damaged_files_are_errors_that_name_them(tmp_path, suffix, content):
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"rows.{suffix}: "):
        read(file)


def test_every_byte_of_a_small_parquet_file_may_be_wrong(tmp_path):
    file = tmp_path / "rows.parquet"
    write_parquet(file, [{"text": f"row {i}"} for i in range(10)])
    good = file.read_bytes()
    for place in range(4, len(good), max(1, len(good) // 5)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        with contextlib.suppress(DataError):
            read(file, on_bad_row="skip")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_compressed_bombs_are_refused_or_read_within_bounds(tmp_path, name, monkeypatch):
    packed = gzip.compress(bytes(50 * MIB))
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(DataError, match="compressed with gzip"):
        read(tmp_path / name)
    (tmp_path / f"{name}.gz").write_bytes(packed)
    with zipfile.ZipFile(tmp_path / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(50 * MIB))
    with pytest.raises(DataError, match=".zip is not a compression that is read"):
        read(tmp_path / f"{name}.zip")
    limit = "larger than 256 MiB|longer than 16.0 MiB|a NUL byte|one column"
    monkeypatch.setattr(files, "_MOST_JSON_BYTES", MIB)
    with pytest.raises(DataError, match=limit.replace("256 MiB", "1.0 MiB")):
        read(tmp_path / f"{name}.gz")


def test_a_csv_record_without_an_end_is_named_or_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 10_000)
    file = tmp_path / "rows.csv"
    fields = ",".join('"' + "line\n" * 500 + '"' for _ in range(8))
    file.write_text(f"a,b,c,d,e,f,g,h\n1,2,3,4,5,6,7,8\n{fields}\n1,2,3,4,5,6,7,9\n")
    with pytest.raises(DataError, match=r"rows.csv:3: the record is longer than 9.8 KiB"):
        read(file)
    rows, counted = read(file, on_bad_row="skip")
    assert rows[0].fields["h"] == "8"
    assert counted[0] == "record longer than 9.8 KiB"


def test_one_field_of_a_csv_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 10_000)
    file = tmp_path / "rows.csv"
    file.write_text('a,b\n1,"' + "line\n" * 5000 + '"\n3,4\n')
    with pytest.raises(DataError, match=r"rows.csv:2: "):
        read(file)


def test_a_json_file_that_would_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_JSON_BYTES", 1000)
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"text": "word " * 30}] * 10))
    with pytest.raises(DataError, match=r"larger than 1000 B, and a .json file is parsed whole") as caught:
        read(file)
    assert ".jsonl" in caught.value.hint


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
