"""What a chat with two models prints into a pipe: whose answer it is, each on lines of its own."""

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
