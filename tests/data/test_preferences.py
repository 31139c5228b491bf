"""Preference data is refused by name: fitune would learn the bad answers too."""

import pytest

from fitune.data.conversations.formats import to_example
from fitune.data.conversations.messages import Conversation, Message, Text
from fitune.data.reading.rows import Row
from fitune.errors import DataError
from jsonl import write_lines

ASKED, ANSWERED = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yo"}]
SAID = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]

JUDGED, TALK = {"prompt": "hi", "completion": "no"}, ASKED + ANSWERED
PAIRED, STEPS = "chosen and rejected", "labels of single steps"
PREFERENCES = [
    ("label: false", JUDGED | {"label": False}),
    ("label: false", JUDGED | {"label": "False"}),  # of a CSV file
    ("label: 0", JUDGED | {"label": 0}),
    ("kto_tag: true", {"conversations": SAID, "kto_tag": True}),
    ("kto_tag: false", {"instruction": "hi", "output": "yo", "kto_tag": False}),
    (PAIRED, {"prompt": "hi", "chosen": "yo", "rejected": "no"}),
    (PAIRED, {"chosen": TALK, "rejected": TALK}),
    ("chosen_response and rejected_response", JUDGED | {"chosen_response": "yo", "rejected_response": "no"}),
    (STEPS, {"prompt": "hi", "completions": ["a", "b"], "labels": [True, False]}),
    (STEPS, {"messages": TALK, "labels": [True, False]}),
]


def test_preference_data_is_refused_by_name_even_where_bad_rows_are_skipped(tmp_path, prepare):
    for found, fields in PREFERENCES:
        with pytest.raises(DataError, match=rf"rows.jsonl:1: the row has {found}.*preference data") as caught:
            prepare(write_lines(tmp_path / "rows.jsonl", [fields]), on_bad_row="skip")
        assert caught.value.hint


def made(fields, **settings):
    return to_example(Row("f:9", fields), **{"format": "auto"} | settings)


def test_a_judged_row_further_down_is_refused_too():
    with pytest.raises(DataError, match="f:9: the row has label: false"):
        made(JUDGED | {"label": False}, format="prompt_completion")


def test_the_hint_names_columns_that_work():
    fields = {"question": "hi", "chosen": "yo", "rejected": "no"}
    with pytest.raises(DataError) as caught:
        made(fields)
    assert "columns: {prompt: question, completion: chosen}" in caught.value.hint
    expected = Conversation((Message("user", "hi"), Message("assistant", "yo")), "f:9")
    assert made(fields, columns=(("prompt", "question"), ("completion", "chosen"))) == expected


@pytest.mark.parametrize("extra", [{"label": 1}, {"label": True}, {"labels": [True, False]}])
def test_a_class_of_plain_text_is_left_alone(extra):
    assert made({"text": "good film"} | extra) == Text("good film", "f:9")


UNRELATED = {"label": ["math", 7, None, 0.5], "labels": [["a", "b"]], "chosen": [3], "kto_tag": [None]}


def test_an_unrelated_label_beside_an_answer_is_left_alone():
    for key, values in UNRELATED.items():
        for value in values:
            assert isinstance(made(JUDGED | {key: value}), Conversation)


def test_a_column_mapping_and_a_named_format_choose():
    columns = tuple((name, name) for name in JUDGED)
    assert isinstance(made(JUDGED | {"label": False}, columns=columns), Conversation)
    paired = {"messages": TALK, "chosen": ANSWERED, "rejected": ANSWERED}
    assert isinstance(made(paired, format="messages"), Conversation)
