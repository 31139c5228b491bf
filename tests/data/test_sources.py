"""The same rows come out of every kind of file; samples and folders are read the same way every time; a key that is
there twice is refused."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fitune.data.reading.rows import Row
from fitune.data.reading.sources import content_key, read_rows, rows_of
from fitune.errors import DataError
from fitune.values.plan import DataSource
from jsonl import write_lines

ROWS = [{"prompt": f"question {i} é", "completion": f"answer {i}"} for i in range(20)]
LINES = [json.dumps(row) for row in ROWS]
BOM = "\ufeff"
TEXTS = {
    "lines.jsonl": "\n".join([*LINES, ""]), "windows.jsonl": BOM + "\r\n".join([*LINES, ""]),
    "unended.jsonl": "\n\n".join(LINES), "list.json": json.dumps(ROWS),
    "data.json": json.dumps({"data": ROWS}, indent=1), "lines.json": "\n".join([*LINES, ""]),
    "rows.csv": BOM
    + "\r\n".join(["prompt,completion", *(f'"{row["prompt"]}",{row["completion"]}' for row in ROWS)]),
}  # fmt: skip
TABLE = pyarrow.Table.from_pylist(ROWS)
BINARY = {
    "rows.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path, row_group_size=7),
    "stream.arrow": lambda path: write_arrow(pyarrow.ipc.new_stream, path),
    "file.arrow": lambda path: write_arrow(pyarrow.ipc.new_file, path),
}


def write_arrow(open_writer, path):
    with open_writer(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=7)


def read(path, **settings):
    return [row.fields for row in read_rows(DataSource(path=str(path), **settings))]


def texts(path, **settings):
    return [fields["text"] for fields in read(path, **settings)]


@pytest.mark.parametrize("name", [*TEXTS, *BINARY])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    file = tmp_path / name
    if name in TEXTS:
        file.write_bytes(TEXTS[name].encode())
    else:
        BINARY[name](file)
    rows = list(read_rows(DataSource(path=str(file))))
    assert [row.fields for row in rows] == read(tmp_path) == ROWS
    assert len({row.where for row in rows}) == 20
    assert all(row.where.startswith(str(file)) for row in rows)


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert [row.where for row in read_rows(DataSource(path=str(file)))] == [f"{file}:1", f"{file}:3"]


def test_a_sample_is_the_same_every_time_and_in_order(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ({"text": i} for i in range(1000)))
    taken = texts(f"{file}#50")
    assert taken == sorted(set(taken)) == texts(file, sample=50)
    assert len(taken) == 50
    assert 300 < sum(taken) / 50 < 700
    assert len(read(f"{file}#5000")) == 1000


def test_a_file_with_a_number_sign_in_its_name_is_read_whole(tmp_path):
    (folder := tmp_path / "data#3").mkdir()
    write_lines(folder / "rows.jsonl", ROWS)
    assert read(folder) == ROWS


def test_a_folder_gives_the_files_of_its_split_in_order(tmp_path):
    for name, mark in (("train-00001", "b"), ("train-00000", "a"), ("test", "x"), ("validation", "v")):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": mark}])
    (tmp_path / "README.md").write_text("about")

    for split, marks in (("train", "ab"), ("test", "x"), ("val", "v")):
        assert "".join(texts(tmp_path, split=split)) == marks
    with pytest.raises(
        DataError, match="no files of split 'extra'; there are files of test, train, validation"
    ):
        read(tmp_path, split="extra")


def test_files_named_for_no_split_are_not_passed_over(tmp_path):
    """Beside files that are: nobody would see that they were never read."""
    for name in ("train-1", "train-2", "extra", "more/rows"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / f"{name}.jsonl", [{"text": name}])
    with pytest.raises(
        DataError, match="some files are named for a split, and 2 are not: extra.jsonl, more/rows.jsonl"
    ) as caught:
        read_rows(DataSource(path=str(tmp_path)))
    assert f"{tmp_path}/train-1.jsonl" in caught.value.hint
    assert len(read(f"{tmp_path}/train-*.jsonl")) == 2


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    import datasets

    splits = {name: datasets.Dataset.from_list(rows) for name, rows in (("train", ROWS), ("test", ROWS[:3]))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path)
    assert read(tmp_path) == ROWS
    assert read(tmp_path / "test") == ROWS[:3]


def test_a_hub_id_is_read_through_datasets(monkeypatch):
    import datasets

    load = Mock(return_value=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = list(read_rows(DataSource(path="owner/name:main#4", split="test")))
    load.assert_called_once_with("owner/name", "main", split="test", streaming=False)
    assert len(rows) == 4
    assert rows[0].where.startswith("owner/name:main row ")


def test_a_streamed_hub_dataset_gives_the_same_rows_and_is_known_by_its_commit(tmp_path, monkeypatch):
    import datasets

    write_lines(tmp_path / "rows.jsonl", ROWS)
    real = datasets.load_dataset
    commits = iter(["a", "a", "b"])

    def load_dataset(name, config, *, split, streaming):
        assert streaming
        return real(
            "json", data_files={split: str(tmp_path / "rows.jsonl")}, split=split, streaming=True,
            cache_dir=str(tmp_path / "nothing"),
        )  # fmt: skip

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda name, config: SimpleNamespace(hash=next(commits))
    )
    source = DataSource(path="owner/name", streaming=True)
    assert read("owner/name", streaming=True) == ROWS
    assert len(read("owner/name#4", streaming=True)) == 4
    assert not list(tmp_path.glob("nothing/**/*.arrow")), "nothing is stored"
    keys = [content_key(source) for _ in range(3)]
    assert keys[0] == keys[1] != keys[2]


class _Bucket(MemoryFileSystem):
    """A cloud in memory, under the address of a real one."""

    protocol = "gs"
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("gs://", "memory://"))


def test_cloud_addresses_are_read_through_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "gs", _Bucket)
    _Bucket().pipe_file("/bucket/train.jsonl", TEXTS["lines.jsonl"].encode())
    assert read("gs://bucket/train.jsonl") == read("gs://bucket") == ROWS
    assert content_key(DataSource(path="gs://bucket"))
    with pytest.raises(
        DataError, match=r"gs://bucket/none.jsonl: nothing there: no such file, folder or bucket"
    ):
        read("gs://bucket/none.jsonl")


TWICE = [
    ('{"prompt": "a", "completion": "right", "completion": "wrong"}', "completion"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "role": "assistant", "content": "b"}]}',
        "role",
    ),
]


@pytest.mark.parametrize(("text", "key"), TWICE)
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_key_that_stands_twice_is_refused_with_its_row(tmp_path, text, key, kind):
    """json keeps the last one silently: a row would be trained that nobody wrote."""
    good = '{"prompt": "a", "completion": "b"}'
    file = tmp_path / f"rows.{kind}"
    file.write_text(f"[{good},\n{text}]" if kind == "json" else f"{good}\n{text}\n")
    where = "row 2" if kind == "json" else "rows.jsonl:2"
    with pytest.raises(DataError, match=rf"{where}: the key '{key}' is there twice"):
        list(read_rows(DataSource(path=str(file))))
    good, bad = rows_of(DataSource(path=str(file)))
    assert isinstance(good, Row)
    assert bad.reason == "key twice"


def test_the_same_key_in_two_objects_is_no_key_twice(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('[{"a": {"x": 1}, "b": [{"x": 1}, {"x": 2}]}, {"a": 1, "b": 2}]')
    assert len(list(read_rows(DataSource(path=str(file))))) == 2
