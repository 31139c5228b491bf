"""Preference data is refused by name: fitune would learn the bad answers too."""

import json

import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data.conversations.formats import detect_format, to_example
from fitune.data.conversations.messages import Conversation, Message, Text
from fitune.data.preparing import prepare_data
from fitune.data.reading.rows import Row
from fitune.errors import DataError
from fitune.spec.plan import DataPlan, DataSource

ASKED, ANSWERED = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yo"}]
SAID = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]

PREFERENCES = {
    "KTO, bad": ({"prompt": "hi", "completion": "no", "label": False}, "label: false"),
    "KTO, good": ({"prompt": "hi", "completion": "yo", "label": True}, "label: true"),
    "KTO in CSV": ({"prompt": "hi", "completion": "no", "label": "False"}, "label: false"),
    "KTO in numbers": ({"prompt": "hi", "completion": "no", "label": 0}, "label: 0"),
    "KTO of messages": ({"prompt": ASKED, "completion": ANSWERED, "label": False}, "label: false"),
    "KTO of a chat": ({"messages": ASKED + ANSWERED, "label": False}, "label: false"),
    "KTO, tagged": ({"conversations": SAID, "kto_tag": True}, "kto_tag: true"),
    "KTO of an instruction": ({"instruction": "hi", "output": "yo", "kto_tag": False}, "kto_tag: false"),
    "judged answer": ({"question": "hi", "answer": "no", "label": False}, "label: false"),
    "DPO": ({"prompt": "hi", "chosen": "yo", "rejected": "no"}, "chosen and rejected"),
    "DPO of messages": ({"chosen": ASKED + ANSWERED, "rejected": ASKED + ANSWERED}, "chosen and rejected"),
    "DPO of a chat": ({"conversations": SAID, "chosen": SAID[1], "rejected": SAID[1]}, "chosen and rejected"),
    "DPO with an answer": (
        {"messages": ASKED + ANSWERED, "chosen": "a", "rejected": "b"},
        "chosen and rejected",
    ),
    "DPO, other names": (
        {"prompt": "hi", "completion": "yo", "chosen_response": "yo", "rejected_response": "no"},
        "chosen_response and rejected_response",
    ),
    "PRM": ({"prompt": "hi", "completions": ["a", "b"], "labels": [True, False]}, "labels of single steps"),
    "PRM of a chat": ({"messages": ASKED + ANSWERED, "labels": [True, False]}, "labels of single steps"),
}


@pytest.mark.parametrize("case", PREFERENCES)
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_preference_data_is_refused_by_name(tmp_path, case, on_bad_row):
    fields, found = PREFERENCES[case]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(fields) + "\n")
    data = DataPlan(
        sources=(DataSource(path=str(file)),), cache_dir=str(tmp_path / "cache"), on_bad_row=on_bad_row
    )
    with pytest.raises(DataError, match=rf"rows.jsonl:1: the row has {found}.*preference data") as caught:
        prepare_data(data, tokenizer=byte_tokenizer(), tokenizer_path="tiny", seq_len=64, seed=0)
    assert caught.value.hint


def test_a_judged_row_further_down_is_refused_too():
    with pytest.raises(DataError, match="f:9: the row has label: false"):
        to_example(
            Row("f:9", {"prompt": "hi", "completion": "no", "label": False}), format="prompt_completion"
        )


def test_the_hint_names_columns_that_work():
    row = Row("f:1", {"question": "hi", "chosen": "yo", "rejected": "no"})
    with pytest.raises(DataError) as caught:
        detect_format(row)
    assert "columns: {prompt: question, completion: chosen}" in caught.value.hint
    columns = (("prompt", "question"), ("completion", "chosen"))
    expected = Conversation((Message("user", "hi"), Message("assistant", "yo")), "f:1")
    assert to_example(row, format="auto", columns=columns) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "good film", "label": 1},
        {"text": "good film", "label": True},
        {"text": "good film", "labels": [True, False]},
    ],
)
def test_a_class_of_plain_text_is_left_alone(fields):
    row = Row("f:1", fields)
    assert to_example(row, format=detect_format(row)) == Text("good film", "f:1")


@pytest.mark.parametrize(
    "extra",
    [
        {"label": "math"},
        {"label": 7},
        {"label": None},
        {"label": 0.5},
        {"labels": ["a", "b"]},
        {"chosen": 3},
        {"kto_tag": None},
    ],
)
def test_an_unrelated_label_beside_an_answer_is_left_alone(extra):
    row = Row("f:1", {"prompt": "hi", "completion": "yo", **extra})
    assert isinstance(to_example(row, format=detect_format(row)), Conversation)


def test_a_column_mapping_and_a_named_format_choose():
    judged = Row("f:1", {"prompt": "hi", "completion": "yo", "label": False})
    columns = (("prompt", "prompt"), ("completion", "completion"))
    assert isinstance(to_example(judged, format="auto", columns=columns), Conversation)
    paired = Row("f:1", {"messages": ASKED + ANSWERED, "chosen": ANSWERED, "rejected": ANSWERED})
    assert isinstance(to_example(paired, format="messages"), Conversation)
