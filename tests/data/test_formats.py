"""Every accepted format becomes the conversation it means."""

from typing import get_args

import pytest

from fitune.data.conversations.formats import detect_format, to_example
from fitune.data.conversations.messages import Conversation, Message, Text
from fitune.data.reading.rows import Row
from fitune.errors import DataError
from fitune.values.plan import DataFormat

USER, ANSWER = Message("user", "hi"), Message("assistant", "yo")
SYSTEM = Message("system", "be kind")


def turn(role, content):
    return {"role": role, "content": content}


def said(speaker, value):
    return {"from": speaker, "value": value}


def example(fields, columns=()):
    row = Row("f:1", fields)
    return to_example(row, format=detect_format(row, columns), columns=columns)


HUMAN, GPT = said("human", "hi"), said("gpt", "yo")
ASKED, ANSWERED = turn("user", "hi"), turn("assistant", "yo")
INSTRUCTION = {"instruction": "hi", "output": "yo"}
TOLD = {"system": "be kind"}
BOTH, THREE = (USER, ANSWER), (SYSTEM, USER, ANSWER)
RECOGNISED = [
    ("alpaca", INSTRUCTION | {"input": ""}, BOTH),
    ("alpaca", INSTRUCTION | {"input": None} | TOLD, THREE),
    ("alpaca", INSTRUCTION | {"instruction": "a", "input": "b"}, (Message("user", "a\nb"), ANSWER)),
    ("alpaca", INSTRUCTION | {"history": [["hi", "yo"]]}, BOTH * 2),
    ("sharegpt", {"conversations": [HUMAN, GPT]}, BOTH),
    ("sharegpt", {"conversations": [said("user", "hi"), said("assistant", "yo")]} | TOLD, THREE),
    ("messages", {"messages": [ASKED, ANSWERED]}, BOTH),
    ("messages", {"messages": [turn("system", ""), ASKED, GPT]}, BOTH),
    ("prompt_completion", {"prompt": "hi", "completion": "yo"}, BOTH),
    ("prompt_completion", {"prompt": [ASKED], "completion": [ANSWERED]}, BOTH),
    ("question_answer", {"question": "hi", "answer": "yo"}, BOTH),
    ("dialogue_summary", {"dialogue": "hi", "summary": "yo", "id": 3}, BOTH),
]


@pytest.mark.parametrize(("name", "fields", "messages"), RECOGNISED)
def test_a_format_is_recognised_and_becomes_a_conversation(name, fields, messages):
    assert detect_format(Row("f:1", fields)) == name
    assert example(fields) == Conversation(messages, "f:1")


def test_every_format_can_be_named():
    for name, fields, messages in RECOGNISED:
        row = Row("f:1", fields | {"text": "not this"})
        assert to_example(row, format=name) == Conversation(messages, "f:1")
    assert {*get_args(DataFormat)} == {*(name for name, *_ in RECOGNISED), "text", "auto", "columns"}


def test_plain_text_stays_text():
    assert example({"text": " hi "}) == Text(" hi ", "f:1")


def test_columns_can_be_named():
    fields = {"q": "hi", "a": "yo", "s": "be kind", "text": "not this", "p": [ASKED], "good": [ANSWERED]}
    columns = (("prompt", "q"), ("completion", "a"), ("system", "s"))
    assert detect_format(Row("f:1", fields), columns) == "columns"
    assert example(fields, columns) == Conversation(THREE, "f:1")
    assert example(fields, (("prompt", "p"), ("completion", "good"), ("system", "s"))) == Conversation(
        THREE, "f:1"
    )
    assert example(fields, (("text", "q"),)) == Text("hi", "f:1")


@pytest.mark.parametrize(
    "columns", [(("prompt", "q"),), (("text", "q"), ("prompt", "q")), (("system", "q"),)]
)
def test_a_mapping_that_makes_no_row_is_refused(columns):
    with pytest.raises(DataError, match="is not a mapping"):
        to_example(Row("f:1", {"q": "hi"}), format="columns", columns=columns)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_of_its_own_is_the_thought_of_the_answer(field):
    made = example({"messages": [ASKED, ANSWERED | {field: "hm"}]})
    assert made == Conversation((USER, THOUGHTFUL), "f:1")
    assert made.messages[-1].text == "yo", "what graders compare"


THOUGHTFUL = Message("assistant", "yo", thought="hm")


@pytest.mark.parametrize("names", ["instruction output", "prompt completion", "question answer"])
def test_reasoning_beside_a_question_and_its_answer_is_the_thought_of_the_answer(names):
    asked, answered = names.split()
    row = {asked: "hi", answered: "yo", "thinking": "hm"}
    assert example(row) == Conversation((USER, THOUGHTFUL), "f:1")
    assert example(row, (("prompt", asked), ("completion", answered))) == Conversation(BOTH, "f:1")


def test_fields_of_other_tools_that_say_nothing_are_left_alone():
    asked = ASKED | {"tool_calls": None, "weight": None, "name": "kim"}
    answered = ANSWERED | {"tool_calls": [], "weight": 1, "train": True, "reasoning_content": ""}
    fields = {"messages": [asked, answered], "tools": None, "images": [], "id": 3}
    assert example(fields) == Conversation(BOTH, "f:1")
    assert example({"text": "a cat", "image": "a.png"}) == Text("a cat", "f:1")


UNKNOWN = [
    (
        "--columns prompt=user_question,completion=best_reply",
        {"id": "7", "user_question": "hi", "best_reply": "yo"},
    ),
    ("columns: {prompt: prompt, completion: response}", {"prompt": "hi", "response": "yo"}),
    ("--columns prompt=Input,completion=Output", {"Input": "hi", "Output": "yo"}),
    ("--columns 'prompt=my question,completion=answer'", {"my question": "hi", "answer": "yo"}),
    ("--columns messages=chat", {"chat": [ASKED, ANSWERED]}),
    ("--columns prompt=…,completion=…", {"left": "hi", "right": "yo"}),
]


@pytest.mark.parametrize(("hint", "fields"), UNKNOWN)
def test_a_row_with_other_columns_is_refused_with_the_option_that_names_them(hint, fields):
    with pytest.raises(DataError, match=", ".join(sorted(fields))) as caught:
        detect_format(Row("f:1", fields))
    assert hint in caught.value.hint
    assert "{instruction, output" in caught.value.hint
