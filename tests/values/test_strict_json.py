"""JSON of others: what is refused, in words, before anything deep, doubled or endless is handed on."""

import json

import pytest

from fitune.values.serial import MOST_NESTING, parse_json, parse_object, read_object


def nested(depth):
    return (
        '{"a":' * (depth // 2) + "[" * (depth - depth // 2) + "]" * (depth - depth // 2) + "}" * (depth // 2)
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"hidden_size": 1, "vocab_size": 2, "hidden_size": 3}', "the key 'hidden_size' is there twice"),
        (nested(MOST_NESTING + 1), "nested more than 64 deep"),
        ('[{"a":' * 30_000, "nested more than 64 deep"),
        ("{", "not JSON: line 1, column 2"),
        ("", "not JSON: line 1, column 1"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        ('{"a": "\\ud83d"}', "unpaired surrogate (U+D83D)"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_is_refused(content, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are asserted below)
        parse_json(content)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "value", [{}, {"a": [1, 2.5, None, True, "\N{SLIGHTLY SMILING FACE}"]}, json.loads(nested(MOST_NESTING))]
)
def test_what_is_read(value):
    assert parse_object(json.dumps(value)) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value


def test_a_file_is_bounded_and_an_object(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"a": 1}')
    assert read_object(file, largest_bytes=8) == {"a": 1}
    with pytest.raises(OSError, match=r"larger than 7 B"):
        read_object(file, largest_bytes=7)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="expected an object, found list"):
        read_object(file)
