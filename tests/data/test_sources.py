"""The same rows come out of every kind of file; samples and folders are read the same way every time."""

import json
import sys
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fitune.data.reading.sources import content_key, read_rows
from fitune.errors import DataError
from fitune.spec.plan import DataSource

ROWS = [{"prompt": f"question {i} é", "completion": f"answer {i}"} for i in range(20)]


def write_lines(path, rows, *, newline="\n", start=b""):
    path.write_bytes(start + "".join(json.dumps(row) + newline for row in rows).encode())
    return path


def write_jsonl(path):
    write_lines(path.with_suffix(".jsonl"), ROWS)


def write_windows_jsonl(path):
    write_lines(path.with_suffix(".jsonl"), ROWS, newline="\r\n", start=b"\xef\xbb\xbf")


def write_unended_jsonl(path):
    path.with_suffix(".jsonl").write_text("\n\n".join(json.dumps(row) for row in ROWS))


def write_list(path):
    path.with_suffix(".json").write_text(json.dumps(ROWS))


def write_data_object(path):
    path.with_suffix(".json").write_text(json.dumps({"data": ROWS}, indent=1))


def write_lines_as_json(path):
    write_lines(path.with_suffix(".json"), ROWS)


def write_csv(path):
    lines = ["prompt,completion", *(f'"{row["prompt"]}",{row["completion"]}' for row in ROWS)]
    path.with_suffix(".csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS), path.with_suffix(".parquet"), row_group_size=7
    )


def write_arrow_stream(path):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_arrow_file(path):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize(
    "write",
    [
        write_jsonl,
        write_windows_jsonl,
        write_unended_jsonl,
        write_list,
        write_data_object,
        write_lines_as_json,
        write_csv,
        write_parquet,
        write_arrow_stream,
        write_arrow_file,
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, write):
    write(tmp_path / "rows")
    (file,) = tmp_path.iterdir()
    rows = list(read_rows(DataSource(path=str(file))))
    assert [row.fields for row in rows] == ROWS
    assert len({row.where for row in rows}) == 20
    assert all(row.where.startswith(str(file)) for row in rows)
    assert [row.fields for row in read_rows(DataSource(path=str(tmp_path)))] == ROWS


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert [row.where for row in read_rows(DataSource(path=str(file)))] == [f"{file}:1", f"{file}:3"]


def test_a_sample_is_the_same_every_time_and_in_order(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [{"text": str(i)} for i in range(1000)])
    taken = [int(row.fields["text"]) for row in read_rows(DataSource(path=f"{file}#50"))]
    assert len(taken) == 50
    assert taken == sorted(set(taken))
    assert taken == [int(row.fields["text"]) for row in read_rows(DataSource(path=str(file), sample=50))]
    assert 300 < sum(taken) / 50 < 700
    assert len(list(read_rows(DataSource(path=f"{file}#5000")))) == 1000


def test_a_file_with_a_number_sign_in_its_name_is_read_whole(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ROWS).rename(tmp_path / "set#5")
    folder = tmp_path / "data#3"
    folder.mkdir()
    file.rename(folder / "rows.jsonl")
    assert len(list(read_rows(DataSource(path=str(folder))))) == 20


def test_a_folder_gives_the_files_of_its_split_in_order(tmp_path):
    for name, mark in (("train-00001", "b"), ("train-00000", "a"), ("test", "x"), ("validation", "v")):
        write_lines(tmp_path / f"{name}.jsonl", [{"text": mark}])
    (tmp_path / "README.md").write_text("about")

    def texts(split):
        return [row.fields["text"] for row in read_rows(DataSource(path=str(tmp_path), split=split))]

    assert texts("train") == ["a", "b"]
    assert texts("test") == ["x"]
    assert texts("val") == ["v"]
    with pytest.raises(
        DataError, match="no files of split 'extra'; there are files of test, train, validation"
    ):
        texts("extra")


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
    assert len(list(read_rows(DataSource(path=f"{tmp_path}/train-*.jsonl")))) == 2


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    import datasets

    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
    ).save_to_disk(tmp_path / "saved")
    assert [row.fields for row in read_rows(DataSource(path=str(tmp_path / "saved")))] == ROWS
    assert len(list(read_rows(DataSource(path=str(tmp_path / "saved" / "test"))))) == 3


def test_a_hub_id_is_read_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = list(read_rows(DataSource(path="owner/name:main#4", split="test")))
    assert asked == [(("owner/name", "main"), {"split": "test", "streaming": False})]
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
    assert [row.fields for row in read_rows(source)] == ROWS
    assert len(list(read_rows(DataSource(path="owner/name#4", streaming=True)))) == 4
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
    with _Bucket().open("/bucket/train.jsonl", "wb") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    for path in ("gs://bucket/train.jsonl", "gs://bucket"):
        assert [row.fields for row in read_rows(DataSource(path=path))] == ROWS
    assert content_key(DataSource(path="gs://bucket"))
    with pytest.raises(
        DataError, match=r"gs://bucket/none.jsonl: nothing there: no such file, folder or bucket"
    ):
        list(read_rows(DataSource(path="gs://bucket/none.jsonl")))


def test_the_content_key_follows_the_content(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", ROWS)
    source = DataSource(path=str(file))
    before = content_key(source)
    assert content_key(source) == before
    write_lines(file, [*ROWS[:-1], {"prompt": "question 19 é", "completion": "answer 20"}])
    assert content_key(source) != before
