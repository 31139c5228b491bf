"""Every accepted format becomes the conversation it means."""

import pytest

from fitune.data.conversations.formats import detect_format, to_example
from fitune.data.conversations.messages import Conversation, Message, Text
from fitune.data.reading.rows import Row
from fitune.errors import DataError

USER, ANSWER = Message("user", "hi"), Message("assistant", "yo")
SYSTEM = Message("system", "be kind")


def turn(role, content):
    return {"role": role, "content": content}


def said(speaker, value):
    return {"from": speaker, "value": value}


def example(fields, columns=()):
    row = Row("f:1", fields)
    return to_example(row, format=detect_format(row, columns), columns=columns)


@pytest.mark.parametrize(
    ("name", "fields", "messages"),
    [
        ("alpaca", {"instruction": "hi", "input": "", "output": "yo"}, (USER, ANSWER)),
        ("alpaca", {"instruction": "hi", "input": None, "output": "yo", "system": "be kind"}, (SYSTEM, USER, ANSWER)),
        ("alpaca", {"instruction": "a", "input": "b", "output": "yo"}, (Message("user", "a\nb"), ANSWER)),
        ("alpaca", {"instruction": "hi", "output": "yo", "history": [["hi", "yo"]]}, (USER, ANSWER, USER, ANSWER)),
        ("sharegpt", {"conversations": [said("human", "hi"), said("gpt", "yo")]}, (USER, ANSWER)),
        (
            "sharegpt",
            {"system": "be kind", "conversations": [said("user", "hi"), said("assistant", "yo")]},
            (SYSTEM, USER, ANSWER),
        ),
        ("messages", {"messages": [turn("user", "hi"), turn("assistant", "yo")]}, (USER, ANSWER)),
        (
            "messages",
            {"messages": [turn("system", ""), turn("user", "hi"), said("gpt", "yo")]},
            (USER, ANSWER),
        ),
        ("prompt_completion", {"prompt": "hi", "completion": "yo"}, (USER, ANSWER)),
        (
            "prompt_completion",
            {"prompt": [turn("user", "hi")], "completion": [turn("assistant", "yo")]},
            (USER, ANSWER),
        ),
        ("question_answer", {"question": "hi", "answer": "yo"}, (USER, ANSWER)),
        ("dialogue_summary", {"dialogue": "hi", "summary": "yo", "id": 3}, (USER, ANSWER)),
    ],
)  # fmt: skip
def test_a_format_is_recognised_and_becomes_a_conversation(name, fields, messages):
    assert detect_format(Row("f:1", fields)) == name
    assert example(fields) == Conversation(messages, "f:1")


def test_plain_text_stays_text():
    assert example({"text": " hi "}) == Text(" hi ", "f:1")


def test_columns_can_be_named():
    fields = {"q": "hi", "a": "yo", "s": "be kind", "text": "not this"}
    columns = (("prompt", "q"), ("completion", "a"), ("system", "s"))
    assert detect_format(Row("f:1", fields), columns) == "columns"
    assert example(fields, columns) == Conversation((SYSTEM, USER, ANSWER), "f:1")
    assert example(fields, (("text", "q"),)) == Text("hi", "f:1")


def test_fields_of_no_format_are_an_error_that_lists_them():
    with pytest.raises(DataError, match="left, right") as caught:
        detect_format(Row("f:1", {"left": 1, "right": 2}))
    assert "instruction" in caught.value.hint
    assert "columns" in caught.value.hint


@pytest.mark.parametrize(
    "columns", [(("prompt", "q"),), (("text", "q"), ("prompt", "q")), (("system", "q"),)]
)
def test_a_mapping_that_makes_no_row_is_refused(columns):
    with pytest.raises(DataError, match="is not a mapping"):
        to_example(Row("f:1", {"q": "hi"}), format="columns", columns=columns)


def test_columns_may_hold_lists_of_messages():
    fields = {"p": [turn("user", "hi")], "good": [turn("assistant", "yo")], "s": "be kind"}
    columns = (("prompt", "p"), ("completion", "good"), ("system", "s"))
    assert example(fields, columns) == Conversation((SYSTEM, USER, ANSWER), "f:1")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_of_its_own_is_the_thought_of_the_answer(field):
    answered = turn("assistant", "yo") | {field: "hm"}
    made = example({"messages": [turn("user", "hi"), answered]})
    assert made == Conversation((USER, Message("assistant", "yo", thought="hm")), "f:1")
    assert made.messages[-1].text == "yo", "what graders compare"


@pytest.mark.parametrize(
    "names", [("instruction", "output"), ("prompt", "completion"), ("question", "answer")]
)
def test_reasoning_beside_a_question_and_its_answer_is_the_thought_of_the_answer(names):
    row = dict(zip(names, ("hi", "yo"), strict=True)) | {"thinking": "hm"}
    answered = Message("assistant", "yo", thought="hm")
    assert example(row) == Conversation((USER, answered), "f:1")
    assert example(row, (("prompt", names[0]), ("completion", names[1]))) == Conversation(
        (USER, ANSWER), "f:1"
    )


def test_fields_of_other_tools_that_say_nothing_are_left_alone():
    asked = turn("user", "hi") | {"tool_calls": None, "weight": None, "name": "kim"}
    answered = turn("assistant", "yo") | {
        "tool_calls": [],
        "weight": 1,
        "train": True,
        "reasoning_content": "",
    }
    fields = {"messages": [asked, answered], "tools": None, "images": [], "id": 3}
    assert example(fields) == Conversation((USER, ANSWER), "f:1")
    assert example({"text": "a cat", "image": "a.png"}) == Text("a cat", "f:1")


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        (
            {"id": "7", "user_question": "hi", "best_reply": "yo"},
            "--columns prompt=user_question,completion=best_reply",
        ),
        ({"prompt": "hi", "response": "yo"}, "columns: {prompt: prompt, completion: response}"),
        ({"Input": "hi", "Output": "yo"}, "--columns prompt=Input,completion=Output"),
        ({"my question": "hi", "answer": "yo"}, "--columns 'prompt=my question,completion=answer'"),
        ({"chat": [turn("user", "hi"), turn("assistant", "yo")]}, "--columns messages=chat"),
        ({"left": "hi", "right": "yo"}, "--columns prompt=…,completion=…"),
    ],
)
def test_a_row_with_other_columns_is_refused_with_the_option_that_names_them(fields, hint):
    with pytest.raises(DataError) as caught:
        detect_format(Row("f:1", fields))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "", "completion": "x"},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "images": ["a"]},
        {"prompt": "a\ud800", "completion": "x"},
        {"messages": [{"role": "user", "content": "x"}], "tools": "{"},
    ],
)
def test_an_error_begins_with_the_place_of_its_row_and_says_it_once(fields):
    with pytest.raises(DataError) as bad:
        to_example(Row("rows.jsonl:7", fields), format="auto")
    assert bad.value.message.startswith("rows.jsonl:7: field '")
    assert bad.value.message.count("rows.jsonl:7") == 1
