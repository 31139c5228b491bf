"""Reading is shown as a bar to a person at a terminal, and as a line now and then in a log."""

import io
import sys

import pytest

from cli.test_progress_lines import Terminal as Tty
from fitune.cli import terminal
from fitune.cli.terminal import Terminal
from fitune.data.ledger import Reading
from fitune.session.events import Note, RowsAnswered, WeightsRead

MIB = 2**20


@pytest.fixture
def shown(monkeypatch):
    """What is on standard error, a terminal or none, after events that are told ten seconds apart."""

    def show(stream, *events):
        monkeypatch.setattr(sys, "stderr", stream)
        now = [0.0]
        monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
        with Terminal(lines=stream) as told:
            for event in events:
                told(event)
                now[0] += 10.0
        return stream.getvalue()

    return show


WEIGHTS = [WeightsRead(done_bytes=done * MIB, total_bytes=8 * MIB) for done in range(9)]
ROWS = [
    Reading(
        doing="tokenising", bytes_read=done * MIB, bytes_in_all=8 * MIB, rows=done * 10, tokens=done * 1_000
    )
    for done in range(9)
]


def test_a_terminal_sees_a_bar_of_data_and_one_of_weights_which_go(shown):
    done = Reading(doing="done", bytes_read=8 * MIB, bytes_in_all=8 * MIB, rows=90, tokens=9_000)
    text = shown(Tty(), *ROWS, done, *WEIGHTS)
    for word in ("tokenising", "90 rows, 9.00 K tokens", "reading weights", "8.0 MiB of 8.0 MiB"):
        assert word in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2


def test_a_log_has_a_line_every_half_minute_and_one_at_the_end(shown):
    done = Reading(doing="done", bytes_read=8 * MIB, bytes_in_all=8 * MIB, rows=90, tokens=9_000)
    lines = shown(io.StringIO(), *ROWS, done).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["tokenising", "tokenising", "tokenised"]
    assert lines[0].endswith("30 rows, 3.00 K tokens, 1 rows/s, 50.0 s left")


def test_a_log_is_told_of_rows_that_are_answered_in_a_while(shown):
    rows = [RowsAnswered(done=done, total=8, new=done, seconds=done * 10.0) for done in range(9)]
    lines = shown(io.StringIO(), *rows).splitlines()
    assert lines[0] == "answered: 3/8 rows, 0.1 rows/s, 50.0 s left"
    assert [line[:13] for line in lines] == ["answered: 3/8", "answered: 6/8", "answered: 8/8"]


def test_what_is_small_is_not_shown(shown):
    assert shown(io.StringIO(), *WEIGHTS[:1], *WEIGHTS[-1:]) == ""


def test_a_line_between_has_a_place_of_its_own(shown):
    text = shown(Tty(), *WEIGHTS[:5], Note("a word"), *WEIGHTS[5:])
    assert text.index("\x1b[?25h") < text.index("a word") < text.rindex("\x1b[?25l")


def test_the_terminal_is_given_back_when_reading_fails(shown):
    assert shown(Tty(), *WEIGHTS[:3]).count("\x1b[?25h") == 1
