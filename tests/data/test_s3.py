"""Sources in a real S3 server: read as a stream, cached by what the store says, and how a store fails."""

import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest

from data.s3_server import SECRET, client, use_server
from fitune.data.reading.sources import content_key, read_rows
from fitune.data.tokenising import RowTokeniser
from fitune.errors import DataError
from fitune.stores import opening, reading
from fitune.values.plan import DataSource
from optional_libraries import NEEDS_S3

pytestmark = NEEDS_S3

ROWS = [{"prompt": f"what is {i}?", "completion": f"it is {i}"} for i in range(3000)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(autouse=True)
def environment(wire, monkeypatch):
    use_server(wire, monkeypatch)


def put(key, content, *, bucket="data"):
    server = client()
    server.create_bucket(Bucket=bucket)
    server.put_object(Bucket=bucket, Key=key, Body=content)
    return f"s3://{bucket}/{key}"


def read(path, **settings):
    return [row.fields for row in read_rows(DataSource(path=path, **settings))]


def test_files_folders_patterns_and_packed_files_are_read(wire):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
    assert read(put("one/rows.parquet", sink.getvalue())) == ROWS
    for number in (1, 0):
        shard = ROWS[number * 1500 : (number + 1) * 1500]
        put(f"shards/part-{number}.jsonl.gz", gzip.compress(lines(shard)))
    wire.requests.clear()
    assert read("s3://data/shards") == ROWS
    assert read("s3://data/shards/part-[0].jsonl.gz") == ROWS[:1500]
    assert read("s3://data/**/part-*.gz#10") == read("s3://data/shards", sample=10)
    asked = {
        request.split(b" ")[0] for request in wire.requests if request.startswith((b"G", b"H", b"P", b"D"))
    }
    assert asked <= {b"GET", b"HEAD"}, "a bucket that may only be read is enough"


def test_rows_are_tokenised_once_until_the_store_says_that_they_changed(tmp_path, prepare, monkeypatch):
    url = put("once/rows.jsonl", lines(ROWS[:50]))
    first = prepare(url)
    put("once/rows.jsonl", lines(ROWS[:50]))
    with monkeypatch.context() as patch:
        patch.setattr(RowTokeniser, "__call__", lambda self, _: pytest.fail("tokenised again"))
        again = prepare(url)
    assert again.train_ledger == first.train_ledger
    put("once/rows.jsonl", lines(ROWS[:51]))
    assert len(prepare(url).train) == 51
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert kept
    assert not any(SECRET.encode() in file.read_bytes() for file in kept)


def test_two_names_of_one_content_have_one_key():
    keys = {content_key(DataSource(path=put(f"copies/{name}.jsonl", lines(ROWS[:5])))) for name in "ab"}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("s3://no-such-bucket/rows.jsonl", "nothing there: no such file, folder or bucket"),
        ("s3://data/*.jsonl", "the pattern names no file"),
        ("s3://data/none/", "nothing there"),
    ],
)
def test_what_is_not_there_is_named(path, said):
    put("other/some.jsonl", b"{}")
    with pytest.raises(DataError, match=said) as caught:
        read(path)
    assert path in caught.value.message
    assert caught.value.hint


def test_credentials_that_are_absent_are_asked_for_and_never_said(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(DataError, match="no credentials for s3://") as caught:
        read("s3://data/rows.jsonl")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    with pytest.raises(DataError, match="contains a name and password") as caught:
        read(f"s3://tests:{SECRET}@data/rows.jsonl")
    assert SECRET not in str(caught.value)


def test_a_store_that_refuses_is_named_without_the_secret(monkeypatch):
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    denied = ClientError({"Error": {"Code": "AccessDenied", "Message": f"denied {SECRET}"}}, "ListObjectsV2")

    def refuse(*_):
        raise translate_boto_error(denied)

    monkeypatch.setattr(reading, "open_store", refuse)
    with pytest.raises(DataError, match="does not let you read it") as caught:
        read("s3://data/rows.jsonl")
    assert SECRET not in str(caught.value)


def test_a_cut_connection_is_taken_up_again(wire, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 20_000)
    url = put("cut/rows.jsonl", lines(ROWS))
    rows = read_rows(DataSource(path=url))
    taken = [next(rows).fields for _ in range(10)]
    wire.cut_after = 30_000
    taken += [row.fields for row in rows]
    assert wire.cut_after is None, "the wire was cut"
    assert taken == ROWS


def test_a_store_that_stays_away_says_how_far_it_came(wire, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 20_000)
    monkeypatch.setitem(opening.OPTIONS["s3fs"]["config_kwargs"], "retries", {"max_attempts": 0})
    url = put("cut/rows.jsonl", lines(ROWS))
    rows = read_rows(DataSource(path=url))
    taken = [next(rows)]
    wire.cut_after, wire.stays_down = 30_000, True
    with pytest.raises(
        DataError, match=r"cut after \d+\.\d KiB of 1\d\d.\d KiB, and 2 tries to go on failed"
    ) as caught:
        taken += rows
    assert 0 < len(taken) < len(ROWS)
    assert SECRET not in str(caught.value)


def test_a_store_that_falls_silent_while_it_is_read_is_given_up_with_how_far_it_came(wire, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 20_000)
    url = put("silent/rows.jsonl", lines(ROWS))
    rows = read_rows(DataSource(path=url))
    next(rows)
    wire.is_silent = True
    with monkeypatch.context() as short:
        short.setattr(opening, "SILENT_S", 0.2)
        short.setattr(opening, "ANSWER_S", 0.2)
        with pytest.raises(
            DataError, match=r"nothing was heard of the store for 0.2 s, after \d+\.\d KiB of 1\d\d\.\d KiB"
        ) as late:
            list(rows)
    wire.is_silent = False
    assert url in late.value.message
    assert "AWS_ENDPOINT_URL = " in late.value.hint
    assert read(url) == ROWS


def test_a_file_that_changes_while_it_is_read_is_an_error(wire, monkeypatch):
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 20_000)
    url = put("changed/rows.jsonl", lines(ROWS))
    rows = read_rows(DataSource(path=url))
    next(rows)
    put("changed/rows.jsonl", lines(ROWS[:2000]))
    with pytest.raises(DataError, match="changed while it was read"):
        list(rows)
