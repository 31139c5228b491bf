"""What a chat with two models prints into a pipe: whose answer it is, each on lines of its own."""

import io
import json
import sys

from fitune.cli.chat import ChatScreen
from fitune.session.score.chat import Reply


def test_the_second_answer_has_its_title_where_the_first_model_has_none(capsys):
    screen = ChatScreen(["a", "b"], as_json=False)
    screen.answered(0, Reply(model="a", ended="error", error="no template"))
    screen.piece(1, "hello")
    screen.answered(1, Reply(model="b", ended="stop"))
    said = capsys.readouterr()
    assert said.out == "── b\nhello\n"
    assert said.err == "a: no template\n"


def test_an_answer_that_fails_on_the_way_ends_its_line(capsys):
    screen = ChatScreen(["a", "b"], as_json=False)
    screen.piece(0, "par")
    screen.answered(0, Reply(model="a", ended="error", error="lost"))
    screen.piece(1, "b")
    assert capsys.readouterr().out == "── a\npar\n── b\nb"


def test_each_line_of_a_pipe_is_a_question_and_one_without_an_answer_fails_the_command(
    call, model_folder, monkeypatch
):
    lines = f"What is 2 plus 3?\n\n{'plus ' * 400}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    ended = call("chat", model_folder, model_folder, "--max-new-tokens", 8, "--json")
    first, second, error = [part for part in ended.out.replace("\n{\n", "\n\x00{\n").split("\n", 2)]
    answers = json.loads(first)["answers"]
    assert answers[0]["text"] == answers[1]["text"] != ""
    assert "not asked" in json.loads(second)["answers"][0]["error"]
    assert json.loads(error.strip("\x00"))["error"]["message"] == "questions without an answer: 1"
    assert ended.code == 1
