"""What a source says twice, or says for nothing, is refused by name; files are hashed once."""

from typing import get_args

import pytest

from fitune.data import preparing
from fitune.data.conversations.formats import _READERS
from fitune.data.reading import sources
from fitune.data.reading.rows import Row
from fitune.data.reading.sources import read_rows, rows_of
from fitune.errors import DataError
from fitune.values.plan import DataFormat, DataSource
from jsonl import write_lines

TWICE = [
    ('{"prompt": "a", "completion": "right", "completion": "wrong"}', "completion"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "role": "assistant", "content": "b"}]}',
        "role",
    ),
]


@pytest.fixture
def rows(tmp_path):
    lines = ({"prompt": f"{n}?", "completion": f"{n}"} for n in range(20))
    return write_lines(tmp_path / "rows.jsonl", lines)


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


def test_a_weight_on_held_out_rows_is_refused(prepare, rows):
    with pytest.raises(DataError, match=r"eval_data .*rows.jsonl: weight 2 is not used"):
        prepare(rows, eval_sources=(DataSource(path=str(rows), weight=2.0),))


def test_every_format_can_be_named(tmp_path, prepare):
    rows = {
        "question_answer": {"question": "a", "answer": "b"}, "dialogue_summary": {"dialogue": "a", "summary": "b"}
    }  # fmt: skip
    for format, row in rows.items():
        file = write_lines(tmp_path / f"{format}.jsonl", [{**row, "text": "not this"}])
        assert prepare(DataSource(path=str(file), format=format)).train_ledger.formats == (format,)
    assert set(get_args(DataFormat)) == {*_READERS, "auto", "columns"}


def test_files_are_hashed_once_a_source(tmp_path, prepare, rows, monkeypatch):
    """A corpus of many GiB is read from end to end each time."""
    hashed, real = [], sources.content_key
    monkeypatch.setattr(
        preparing, "content_key", lambda source, **told: hashed.append(source.path) or real(source)
    )
    copy = tmp_path / "copy.jsonl"
    copy.write_text(rows.read_text())
    for _ in ("made", "from the cache"):
        hashed.clear()
        prepared = prepare(rows, eval_sources=(DataSource(path=str(copy)),))
        assert hashed == [str(rows), str(copy)]
        assert prepared.also_trained == (str(copy),)
