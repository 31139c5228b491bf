"""Rows 10 to 15, 23 and 28 of the fault table: bad data is refused with its place, or skipped and counted."""

import json
import pickle
import re

import pytest

from data.tiny_tokenizers import BRACKET_STYLE, NO_SYSTEM_STYLE, byte_tokenizer
from faults.adapters import Payload
from fitune.data.conversations.formats import to_example
from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import load_template
from fitune.data.preparing import prepare_data
from fitune.data.reading.rows import BadRow, Row
from fitune.data.reading.sources import read_rows, rows_of
from fitune.errors import DataError
from fitune.values.plan import DataPlan, DataSource

GOOD = b'{"prompt": "hi", "completion": "yo"}\n'


def read(path, *, on_bad_row="error"):
    """The rows that can be read, and why the others cannot."""
    source = DataSource(path=str(path))
    if on_bad_row == "error":
        return list(read_rows(source)), []
    rows = list(rows_of(source))
    return [row for row in rows if isinstance(row, Row)], [
        row.reason for row in rows if isinstance(row, BadRow)
    ]


def prepare(tmp_path, *lines, seq_len=64, template=None, **settings):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    data = DataPlan(sources=(DataSource(path=str(file)),), cache_dir=str(tmp_path / "cache"), **settings)
    tokenizer = byte_tokenizer(template=template)
    return prepare_data(data, tokenizer=tokenizer, tokenizer_path="tiny", seq_len=seq_len, seed=0)


# 10: nothing to train on


def test_no_row_left_is_an_error_that_says_why(tmp_path):
    with pytest.raises(DataError, match=r"no rows to train on: .*rows.jsonl gave none"):
        prepare(tmp_path)
    long = {"prompt": "why? " * 90, "completion": "so"}
    lines = [long, long, b"{bad}\n", {"prompt": "hi", "completion": ""}]
    with pytest.raises(DataError) as caught:
        prepare(tmp_path, *lines, on_bad_row="skip")
    assert "gave 4, and all were dropped" in caught.value.message
    assert "2 no answer left after truncation, 1 empty field, 1 not JSON" in caught.value.message
    assert "raise seq_len" in caught.value.hint
    with pytest.raises(DataError, match="not UTF-8") as caught:
        prepare(tmp_path, b'{"prompt": "caf\xe9"}\n', on_bad_row="skip")
    assert "iconv" in caught.value.hint, "and not that rows are too long"


def test_an_evaluation_set_that_is_empty_or_named_twice_is_an_error(tmp_path):
    none = tmp_path / "none.jsonl"
    none.write_text("")
    for settings, said in (
        ({"val_fraction": 0.0001}, "no rows to evaluate.*val_fraction"),
        ({"val_fraction": 0.9999}, "val_fraction 0.9999 holds out 1 of 1 row"),
        ({"val_fraction": 200}, "val_fraction 200 holds out 1 of 1 row"),
        ({"eval_sources": (DataSource(path=str(none)),)}, "no rows to evaluate: .*none.jsonl gave none"),
        ({"eval_sources": (DataSource(path="x"),), "val_fraction": 0.1}, "both eval_data and val_fraction"),
    ):
        with pytest.raises(DataError) as caught:
            prepare(tmp_path, GOOD, **settings)
        assert re.search(said, str(caught.value), re.DOTALL)


# 11: broken files

BROKEN_LINES = {
    "torn": (b'{"prompt": "hi", "compl', "torn last line", "the file ends in the middle of a row"),
    "mid-file": (b'{"prompt": hi}\n' + GOOD, "not JSON", "not JSON: Expecting value at column 12"),
    "not UTF-8": (b'{"prompt": "\xff"}\n' + GOOD, "not UTF-8", "not UTF-8: byte 0xff at column 13"),
    "NUL": (b'{"prompt": "\x00"}\n' + GOOD, "NUL byte", "a NUL byte at column 13"),
    "list": (b"[1, 2]\n" + GOOD, "not an object", "a row is an object with named fields, found list"),
    "deep": (b"[" * 100_000 + b"\n" + GOOD, "not JSON", "not JSON: nested too deeply"),
    "digits": (b'{"prompt": ' + b"1" * 5000 + b"}\n" + GOOD, "not JSON", "not JSON: Exceeds the limit"),
}


@pytest.mark.parametrize("case", BROKEN_LINES)
def test_a_broken_line_is_named_or_counted(tmp_path, case):
    line, reason, cause = BROKEN_LINES[case]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(GOOD + GOOD + line)
    with pytest.raises(DataError) as caught:
        read(file)
    assert caught.value.message.startswith(f"{file}:3: {cause}")
    assert caught.value.message.count(f"{file}:3") == 1
    rows, counted = read(file, on_bad_row="skip")
    assert counted == [reason]
    assert len(rows) == (GOOD + GOOD + line).count(GOOD)


def test_broken_csv_rows_are_named_or_counted(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b"prompt,completion\nhi,yo\none\n\xff,yo\nhi,yo\n")
    with pytest.raises(DataError, match=r"rows.csv:3: 1 fields, the header names 2"):
        read(file)
    rows, counted = read(file, on_bad_row="skip")
    assert len(rows) == 2
    assert counted == ["wrong number of fields", "not UTF-8"]


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("rows.json", b'[{"a": 1},\n{"a": }]', r"rows.json:2: not JSON: Expecting value at column 7"),
        ("rows.json", b'{"rows": []}', "expected a list of rows"),
        ("rows.json", b"\xff", r"rows.json:1: not UTF-8"),
        ("rows.csv", b"a,a\n1,2\n", "two columns are named 'a'"),
    ],
)
def test_a_file_that_is_broken_as_a_whole_is_an_error_even_when_skipping(tmp_path, name, content, cause):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=cause):
        read(tmp_path / name, on_bad_row="skip")


def test_broken_rows_stop_a_run_or_are_in_its_ledger(tmp_path):
    lines = (GOOD, b"{bad}\n", {"prompt": "hi", "completion": None}, GOOD)
    with pytest.raises(DataError, match="rows.jsonl:2: not JSON") as stopped:
        prepare(tmp_path, *lines)
    assert "on_bad_row: skip" in stopped.value.hint
    prepared = prepare(tmp_path, *lines, on_bad_row="skip")
    assert prepared.train_ledger.dropped == {"not JSON": 1, "null field": 1}
    assert (prepared.train_ledger.rows_read, prepared.train_ledger.rows_kept) == (4, 2)


# 12: rows that say nothing fitune understands

BAD_ROWS = {
    "missing": ("alpaca", {"instruction": "hi"}, "'output' is missing; the row has instruction"),
    "null": ("prompt_completion", {"prompt": "hi", "completion": None}, "'completion' is null"),
    "type": ("prompt_completion", {"prompt": "hi", "completion": 4}, "'completion' is int, expected text: 4"),
    "empty answer": ("question_answer", {"question": "hi", "answer": " \n"}, "'answer' is empty"),
    "no list": ("messages", {"messages": "hi"}, "'messages' is not a list of messages: 'hi'"),
    "role": (
        "messages",
        {"messages": [{"role": "usr", "content": "hi"}]},
        r"'messages\[0\].role' .* 'user'.*: 'usr'",
    ),
    "null content": (
        "messages",
        {"messages": [{"role": "user", "content": None}]},
        r"'messages\[0\].content' is null",
    ),
    "order": (
        "messages",
        {"messages": [{"role": "assistant", "content": "yo"}]},
        "message 1 is from assistant, expected user",
    ),
    "history": (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["x"]]},
        r"'history\[0\]' is not a pair",
    ),
    "two thoughts": (
        "messages",
        {"messages": [{"role": "assistant", "content": "b", "reasoning": "hm", "thinking": "so"}]},
        r"'messages\[0\].thinking' is not supported: 'so'",
    ),
    "not to be trained": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": False}]},
        r"'conversations\[1\].train' is not supported: False",
    ),
    "image": (
        "question_answer",
        {"question": "a", "answer": "b", "image": "a.png"},
        "'image' is not supported",
    ),
    "surrogate": (
        "text",
        {"text": "a\ud83d"},
        r"'text' contains an unpaired surrogate \(U\+D83D at character 2\)",
    ),
    "noncharacter": ("text", {"text": "a\ufdd0"}, r"'text' holds the noncharacter U\+FDD0"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_with_its_field_its_value_and_what_is_accepted(case):
    format, fields, message = BAD_ROWS[case]
    with pytest.raises(BadRow, match=f"^rows.jsonl:7: field .*{message}") as caught:
        to_example(Row("rows.jsonl:7", fields), format=format)
    assert caught.value.message.count("rows.jsonl:7") == 1
    assert caught.value.hint
    assert caught.value.reason


def test_a_first_row_of_no_format_is_an_error_even_when_skipping(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:1: format auto: the row has left, right"):
        prepare(tmp_path, {"left": "a", "right": "b"}, GOOD, on_bad_row="skip")


# 13: rows that do not fit


def test_a_row_with_nothing_to_learn_is_never_trained(tmp_path):
    long = {"prompt": "why? " * 90, "completion": "so"}
    for policy in ("truncate", "drop"):
        prepared = prepare(tmp_path, GOOD, long, on_long_row=policy)
        assert len(prepared.train) == 1
        assert sum(prepared.train_ledger.dropped.values()) == 1
        assert prepared.train_ledger.tokens_cut == 0
    split = prepare(tmp_path, GOOD, long, on_long_row="split")
    assert len(split.train) == 2
    assert split.train_ledger.rows_cut == 1
    assert split.train.labels_per_row.min() >= 1


def test_an_answer_of_which_only_the_first_token_is_left_is_kept(tmp_path):
    """The last token kept is the answer's first: there is one label, and one token less is none."""
    tokenizer = byte_tokenizer()
    asked = Conversation((Message("user", "hi"), Message("assistant", "yo yo yo yo")), "row 1")
    prompt = len(load_template(tokenizer).encode_prompt(asked))
    row = {"prompt": "hi", "completion": "yo yo yo yo"}
    assert prepare(tmp_path, row, seq_len=prompt + 1).train_ledger.tokens_supervised == 1
    with pytest.raises(DataError, match="1 no answer left after truncation"):
        prepare(tmp_path, row, seq_len=prompt)


# 15: templates


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (
            "{{ raise_exception('not today') }}",
            "the template failed: .*not today",
        ),
        ("{% if %}", "the tokenizer's chat template"),
        ("{{ 'a' + 1 }}", "the tokenizer's chat template"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the tokenizer's chat template"),
        ("{% include 'other' %}", "the tokenizer's chat template"),
        ("{{ '\\ud83d' }}", r"writes an unpaired surrogate \(U\+D83D\)"),
        ("nothing of what was said", "leaves out the user message 'ping'"),
        ("{{ messages[0].content }}", "cannot find the answers"),
        (
            "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}{% if add_generation_prompt %}model{% endif %}",
            "asks for an answer with 'model' but writes 'assistant",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            "1 answers are marked as 2",
        ),
        (
            "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
            "{{ x[1:] }}{% endfor %}",
            "moves or cuts the text of its generation blocks",
        ),
        ("{{ '\ufdd0' }}{{ messages[0].content }}", "moves or cuts"),
        (
            "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}",
            "line 1: Unexpected end of template",
        ),
    ],
)
def test_a_template_that_does_not_work_is_refused_at_once(template, cause):
    with pytest.raises(DataError, match=cause):
        load_template(byte_tokenizer(template=template))


def test_a_template_or_an_end_that_does_not_exist_is_an_error(tmp_path):
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    for name in ("llama3", str(tmp_path / "binary.jinja")):
        with pytest.raises(DataError, match=f"chat_template {name!r} cannot be read") as caught:
            load_template(byte_tokenizer(), name)
        assert "Jinja file" in caught.value.hint
    with pytest.raises(DataError, match="no EOS token"):
        load_template(byte_tokenizer(eos_token=None))


@pytest.mark.parametrize(
    ("template", "cause", "reason"),
    [
        (NO_SYSTEM_STYLE, "does not support a system message", "not supported by the template"),
        (BRACKET_STYLE, "leaves out the system message 'be kind'", "left out by the template"),
    ],
)
def test_a_system_message_the_template_has_no_place_for_is_named_or_counted(
    tmp_path, template, cause, reason
):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = {"messages": messages}, {"messages": [{"role": "system", "content": "be kind"}, *messages]}
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{cause}"):
        prepare(tmp_path, *rows, template=template)
    prepared = prepare(tmp_path, *rows, template=template, on_bad_row="skip")
    assert prepared.train_ledger.dropped == {f"system message {reason}": 1}
    assert len(prepared.train) == 1


# 23 and 28: what is not opened


@pytest.mark.parametrize("suffix", ["pkl", "bin"])
def test_pickled_data_is_refused_and_not_run(tmp_path, suffix):
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(DataError, match="are pickles, and opening a pickle runs the code inside it"):
        read(file)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DataError, match="no data files in this folder"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://10.0.0.1/a.jsonl", "opened only when that is allowed"),
        ("file:///etc/passwd", "not a data file"),
        ("s3::http://x/a.jsonl", "addresses are not opened"),
        ("ssh://x/a.jsonl", "ssh:// addresses are not opened"),
    ],
)
def test_addresses_that_are_not_opened(url, why):
    with pytest.raises(DataError, match=why) as caught:
        read(url)
    assert caught.value.hint


@pytest.mark.parametrize("path", ["nothing.jsonl", "no/such/folder", "./no/folder"])
def test_a_path_to_nothing_is_an_error(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        read(path)


def test_a_hub_that_does_not_answer_and_a_sample_of_no_number_are_errors(tmp_path, monkeypatch):
    import datasets

    def fail(*_args, **_kwargs):
        raise ConnectionError("cannot reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="owner/name: no such file here, .*: cannot reach the Hub"):
        read("owner/name")
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    for count in ("0", "²", "9" * 5000):
        with pytest.raises(DataError, match="is not a number of rows"):
            read(f"{tmp_path / 'rows.jsonl'}#{count}")


# damaged files


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
    for content in (b"", b"PAR1" + bytes(100) + b"PAR1"):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"rows.{suffix}: "):
            read(file)
    for place in range(4, len(good), max(1, len(good) // 200)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        try:
            read(file, on_bad_row="skip")
        except DataError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("levels", [70, 100_000])
def test_a_row_nested_deeply_is_named_or_counted(tmp_path, levels):
    deep = '{"prompt": ' + '[{"a":' * (levels // 2) + "1" + "}]" * (levels // 2) + ', "completion": "x"}'
    file = tmp_path / "rows.json"
    file.write_text(f'[{{"prompt": "a", "completion": "b"}}, {deep}]')
    with pytest.raises(DataError, match=r"nested"):
        read(file)
    if levels < 100_000:  # such a file is no JSON as a whole
        rows, counted = read(file, on_bad_row="skip")
        assert (len(rows), len(counted)) == (1, 1)
