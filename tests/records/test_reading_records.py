"""Records files: what is read, and which line an error names."""

import json
from pathlib import Path

import pytest

from fitune.errors import DataError
from fitune.records.row import read_records
from jsonl import read_lines

RUNS = Path(__file__).with_name("runs.jsonl")


def lines(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_every_row_is_read_in_order():
    rows = read_records(RUNS)
    assert [row.id for row in rows][:2] == ["full-one-device", "full-fsdp-two"]
    assert rows[0].amount("peak_mem_gib") == 67.46
    assert rows[0].size("seq_len") == 4096


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (({"id": "a"}, "{'id': 1}"), r"rows\.jsonl line 2: not JSON(.|\n)*one JSON object a line"),
        (({"id": "a"}, "", "[1, 2]"), "line 3: expected an object, found list"),
        (({"id": "a"}, {"id": "b"}, {"id": "a"}), "line 3: id 'a' is that of line 1 too"),
        (("",), "has no rows"),
    ],
)
def test_lines_that_are_no_records_are_named(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        read_records(lines(tmp_path, *rows))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match="is not UTF-8"):
        read_records(path)


@pytest.mark.parametrize("key", ["seq_len", "tok_s_per_gpu"])
def test_sizes_that_are_none_are_refused_with_line_and_key(tmp_path, key):
    for value in (0, -1, float("inf"), float("nan"), 10**400):
        with pytest.raises(DataError, match=f"line 2: {key} = .* must be more than zero"):
            read_records(lines(tmp_path, {"id": "a"}, {"id": "b", key: value}))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"seq_len": 12.5}, "is not a whole number"),
        ({"seq_len": "2048"}, "is not a number"),
        ({"layers": True}, "is not a number"),
        ({"outcome": "maybe"}, "must be ok, oom or null"),
        ({"confidence_mem": "very"}, "must be high, medium, low or null"),
        ({"gpu": ["a100"]}, "is not a word"),
        ({"micro_batch": 10**11}, "no more than a machine can hold"),
    ],
)
def test_other_impossible_values_are_refused(tmp_path, facts, why):
    with pytest.raises(DataError, match=why):
        read_records(lines(tmp_path, {"id": "a", **facts}))


def test_a_document_of_ours_with_rows_goes_through_the_same_door(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"date": "2026-01-01", "rows": read_lines(RUNS)}, indent=1))
    assert [row.id for row in read_records(path)] == [row.id for row in read_records(RUNS)]


def test_rows_without_id_and_source_get_those_of_their_place(tmp_path):
    first, second = read_records(lines(tmp_path, {}, {}))
    assert (first.id, second.id) == ("line-1", "line-2")
    assert first.source == "rows.jsonl"
