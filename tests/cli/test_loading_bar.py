"""Reading weights is shown to a person at a terminal, in bytes, and to nobody else."""

import io
from contextlib import suppress

from cli.test_progress_lines import Terminal
from fitune.cli.terminal import loading_bar


def shown(stream, *, quiet=False):
    with loading_bar(quiet=quiet, stream=stream) as on_bytes:
        for done in range(0, 4097, 1024):
            on_bytes(done * 1024, 4096 * 1024)
    return stream.getvalue()


def test_a_terminal_sees_bytes():
    text = shown(Terminal())
    assert "reading weights" in text
    assert "MiB" in text


def test_a_log_sees_nothing():
    assert shown(io.StringIO()) == ""
    assert shown(Terminal(), quiet=True) == ""


def test_the_terminal_is_given_back_when_loading_fails():
    stream = Terminal()

    with suppress(OSError), loading_bar(stream=stream, quiet=False) as on_bytes:
        on_bytes(1, 2)
        raise OSError
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")
