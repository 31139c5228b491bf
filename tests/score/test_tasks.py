"""Tasks: every row is asked with the ids it would be trained with, under an id of its own."""

import pytest

from fitune.data.conversations.messages import Conversation, Message
from fitune.errors import DataError
from fitune.score.index import index_input, open_index
from fitune.score.questions import Input
from fitune.score.tasks import to_task
from fitune.values.plan import DataSource
from jsonl import write_lines


def write_rows(path, rows):
    return DataSource(path=str(write_lines(path, rows)))


def checked(*sources, id_column=""):
    with open_index() as index:
        index_input(Input(sources=tuple(sources), id_column=id_column), index)
    return list(Input(sources=tuple(sources), id_column=id_column).questions())


def row(number, **more):
    return {"prompt": f"question {number}", "completion": f"answer {number}", **more}


def test_prompt_ids_are_the_beginning_of_the_training_ids(tiny, tmp_path):
    messages = (Message("system", "Be brief."), Message("user", "Where to?"), Message("assistant", "Oslo"))
    conversation = Conversation(messages, "here:1")
    task = to_task(conversation, id="a", template=tiny.template)
    encoded = tiny.template.encode(conversation)
    prompt = list(task.prompt_ids)
    assert encoded.ids[: len(prompt)] == prompt
    assert not any(encoded.supervised[: len(prompt)])
    assert all(encoded.supervised[len(prompt) :])
    assert (task.expected, task.question.text, task.question.where) == (
        "Oslo",
        "Be brief.\nWhere to?",
        "here:1",
    )


def test_a_column_named_body_is_a_column_where_it_holds_no_request(tmp_path):
    (question,) = checked(write_rows(tmp_path / "mail.jsonl", [row(1, body="Dear Sir")]))
    assert (question.problem, question.expected) == ("", "answer 1")
    request = {"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Where?"}]}}
    (asked,) = checked(write_rows(tmp_path / "batch.jsonl", [request]))
    assert (asked.problem, asked.expected) == ("", None)


@pytest.mark.parametrize("column", ["id", "custom_id", "key"])
def test_ids_come_from_a_column(tiny, tmp_path, column):
    source = write_rows(tmp_path / "rows.jsonl", [row(1, **{column: "b"}), row(2, **{column: 7})])
    wanted = "key" if column == "key" else ""
    tasks = checked(source, id_column=wanted)
    assert [task.id for task in tasks] == ["b", "7"]
    assert [task.expected for task in tasks] == ["answer 1", "answer 2"]


def test_repeated_ids_are_listed_with_both_places(tiny, tmp_path):
    rows = [row(number, id=str(number % 10)) for number in range(30)]
    with pytest.raises(DataError, match=r"20 of 30 rows repeat an id of column 'id'") as caught:
        checked(write_rows(tmp_path / "rows.jsonl", rows))
    assert "'0' at " in caught.value.message
    assert "rows.jsonl:11, already at " in caught.value.message
    assert "and 15 more" in caught.value.message


def test_a_number_and_its_text_are_the_same_id(tiny, tmp_path):
    with pytest.raises(DataError, match="repeat an id"):
        checked(write_rows(tmp_path / "r.jsonl", [row(1, id=1), row(2, id="1")]))


@pytest.mark.parametrize("bad", [None, "", "  ", 1.5, True, ["x"]])
def test_a_missing_id_is_refused_with_its_row(tiny, tmp_path, bad):
    rows = [row(1, id="a"), row(2, id=bad), row(3)]
    with pytest.raises(DataError, match=r"2 of 3 rows have no id in column 'id'.*rows.jsonl:2.*rows.jsonl:3"):
        checked(write_rows(tmp_path / "rows.jsonl", rows))


def test_no_rows_and_plain_text_are_refused(tiny, tmp_path):
    with pytest.raises(DataError):
        checked(write_rows(tmp_path / "none.jsonl", []))
    with pytest.raises(DataError, match="no answer to compare with"):
        checked(write_rows(tmp_path / "text.jsonl", [{"text": "once upon a time"}]))


def test_another_prompt_has_another_fingerprint(tiny):
    def fingerprint(text):
        conversation = Conversation((Message("user", text), Message("assistant", "x")), "here")
        return to_task(conversation, id="a", template=tiny.template).fingerprint

    assert fingerprint("one") == fingerprint("one") != fingerprint("two")


@pytest.mark.parametrize(("name", "value"), [("n", 5), ("n", True), ("stream", True)])
def test_a_batch_line_that_asks_for_several_answers_or_parts_of_one_is_an_error_of_its_row(
    tmp_path, name, value
):
    body = {"messages": [{"role": "user", "content": "Where?"}]}
    rows = [
        {"custom_id": "a", "body": body | {name: value}},
        {"custom_id": "b", "body": body | {"n": 1, "stream": False, "store": True}},
    ]
    refused, asked = checked(write_rows(tmp_path / "batch.jsonl", rows))
    assert f"body.{name} = {value!r}: each line gets one whole answer" in refused.problem
    assert not asked.problem
