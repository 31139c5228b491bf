"""Questions and tasks: every row of one file or several is asked with the ids it would be trained with, in the order of
the files, under an id of its own."""

import pytest

import fitune
from fitune.data.conversations.messages import Conversation, Message
from fitune.errors import DataError, RunDirectoryError
from fitune.recipe.score_recipe import score_recipe
from fitune.score.index import index_input, open_index
from fitune.score.questions import Input
from fitune.score.tasks import to_task
from fitune.session.score.score_plan import plan_of, read_lengths
from fitune.values.plan import DataSource
from jsonl import read_lines, write_lines


def checked(path, rows, *, id_column=""):
    """The questions of a file, whose ids were looked at."""
    data = Input(sources=(DataSource(path=str(write_lines(path, rows))),), id_column=id_column)
    with open_index() as index:
        index_input(data, index)
    return list(data.questions())


def row(number, **more):
    return {"prompt": f"question {number}", "completion": f"answer {number}", **more}


def test_prompt_ids_are_the_beginning_of_the_training_ids(tiny):
    messages = (Message("system", "Be brief."), Message("user", "Where to?"), Message("assistant", "Oslo"))
    conversation = Conversation(messages, "here:1")
    task = to_task(conversation, id="a", template=tiny.template)
    encoded = tiny.template.encode(conversation)
    prompt = list(task.prompt_ids)
    assert encoded.ids[: len(prompt)] == prompt
    assert not any(encoded.supervised[: len(prompt)])
    assert all(encoded.supervised[len(prompt) :])
    assert (task.expected, task.question.where) == ("Oslo", "here:1")
    assert task.question.text == "Be brief.\nWhere to?"


def test_another_prompt_has_another_fingerprint(tiny):
    def fingerprint(text):
        conversation = Conversation((Message("user", text), Message("assistant", "x")), "here")
        return to_task(conversation, id="a", template=tiny.template).fingerprint

    assert fingerprint("one") == fingerprint("one") != fingerprint("two")


def test_a_column_named_body_is_a_column_where_it_holds_no_request(tmp_path):
    (question,) = checked(tmp_path / "mail.jsonl", [row(1, body="Dear Sir")])
    assert (question.problem, question.expected) == ("", "answer 1")
    (asked,) = checked(tmp_path / "batch.jsonl", [BATCH_LINE])
    assert (asked.problem, asked.expected) == ("", None)


@pytest.mark.parametrize("column", ["id", "custom_id", "key"])
def test_ids_come_from_a_column(tmp_path, column):
    rows = [row(1, **{column: "b"}), row(2, **{column: 7})]
    questions = checked(tmp_path / "rows.jsonl", rows, id_column="key" if column == "key" else "")
    assert [(one.id, one.expected) for one in questions] == [("b", "answer 1"), ("7", "answer 2")]


def test_repeated_ids_are_listed_with_both_places_and_a_number_is_its_text(tmp_path):
    rows = [row(number, id=number % 10 if number < 20 else str(number % 10)) for number in range(30)]
    with pytest.raises(DataError, match=r"20 of 30 rows repeat an id of column 'id'") as caught:
        checked(tmp_path / "rows.jsonl", rows)
    assert "'0' at " in caught.value.message
    assert "rows.jsonl:11, already at " in caught.value.message
    assert "and 15 more" in caught.value.message


@pytest.mark.parametrize("bad", [None, "  ", 1.5, True])
def test_a_missing_id_is_refused_with_its_row(tmp_path, bad):
    rows = [row(1, id="a"), row(2, id=bad), row(3)]
    with pytest.raises(DataError, match=r"2 of 3 rows have no id in column 'id'.*rows.jsonl:2.*rows.jsonl:3"):
        checked(tmp_path / "rows.jsonl", rows)


def test_plain_text_is_refused(tmp_path):
    with pytest.raises(DataError, match="no answer to compare with"):
        checked(tmp_path / "text.jsonl", [{"text": "once upon a time"}])


CHOICE = {"question": "Which?", "choices": ["a", "b"], "answer": 0}
BATCH_LINE = {"custom_id": "x", "body": {"messages": [{"role": "user", "content": "Where?"}]}}


def asked(*names):
    return [{"id": name, "prompt": f"Where is {name}?", "completion": "Oslo"} for name in names]


@pytest.fixture
def files(tmp_path):
    """B is first in the alphabet's order of names, and second on the command line."""
    return [
        write_lines(tmp_path / "b.jsonl", asked("one", "two")),
        write_lines(tmp_path / "a.jsonl", asked("three")),
    ]


def scored(tiny, files, out, **more):
    return fitune.score(tiny.folder, files, out, max_new_tokens=2, batch_size=2, **more)


def ids(out):
    return [line["custom_id"] for line in read_lines(out / "answers.jsonl")]


def test_every_data_option_of_the_command_is_scored_in_its_order_and_not_again(tiny, files, tmp_path, call):
    out = tmp_path / "out"
    words = ["--max-new-tokens", "2", "--batch-size", "2", "--model", tiny.folder, "--out", out]
    call("score", *words, *(f"--data={file}" for file in files)).ends(0)
    assert ids(out) == ["one", "two", "three"]
    write_lines(files[0], asked("one", "two", "four"))
    grown = scored(tiny, files, out)
    assert (grown.rows, grown.answered, grown.rows_asked) == (4, 4, 1)
    assert grown.data == f"{files[0]}, {files[1]}"
    assert ids(out) == ["one", "two", "four", "three"]
    with pytest.raises(RunDirectoryError, match=r"data: 'b\.jsonl, split train.*; a\.jsonl, split"):
        scored(tiny, files[:1], out)


def test_rows_without_ids_are_numbered_over_all_files_and_counted_in_a_plan(tiny, tmp_path):
    nameless = [{"prompt": "Where?", "completion": "Oslo"}]
    files = [write_lines(tmp_path / name, nameless * 2) for name in ("b.jsonl", "a.jsonl")]
    scored(tiny, files, tmp_path / "out")
    assert ids(tmp_path / "out") == ["1", "2", "3", "4"]
    assert read_lengths(plan_of(score_recipe(model=tiny.folder, data=files, max_new_tokens=2))).rows == 4


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (asked("two", "one"), r"1 of 3 rows repeat an id of column 'id': 'one' at .*a\.jsonl:2, already"),
        ([CHOICE | {"id": "two"}], r"b\.jsonl has rows with references, .*a\.jsonl rows with choices"),
        ([BATCH_LINE], r"b\.jsonl has rows with references, .*a\.jsonl lines of OpenAI's batch input"),
        ([{"custom_id": "two", "prompt": "p", "completion": "c"}],
         r"b\.jsonl are named by column 'id', those of .*a\.jsonl named by column 'custom_id'"),
        ([{"prompt": "p", "completion": "c"}], r"those of .*a\.jsonl without ids"),
        ([], r"a\.jsonl"),
    ],
)  # fmt: skip
def test_files_that_are_no_one_list_of_rows_are_refused_by_name(tiny, tmp_path, second, words):
    files = [write_lines(tmp_path / "b.jsonl", asked("one")), write_lines(tmp_path / "a.jsonl", second)]
    with pytest.raises(DataError, match=words):
        scored(tiny, files, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_id_column_may_be_named_for_files_that_differ(tiny, tmp_path):
    rows = [row(1, id="x", key="one"), row(2, key="two")]
    files = [write_lines(tmp_path / f"{number}.jsonl", [each]) for number, each in enumerate(rows)]
    scored(tiny, files, tmp_path / "out", id_column="key")
    assert ids(tmp_path / "out") == ["one", "two"]
