"""``fitune chat`` on a terminal: a person presses keys."""

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHAT = [sys.executable, "-m", "fitune", "chat"]


@pytest.fixture
def endless(model_folder, tmp_path):
    """The tiny model with positions for an answer of several minutes."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "endless"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 200_000}))
    return folder


def _sit_at_terminal():
    """Let Ctrl-C be a signal, also where the tests run as a shell's background job, which ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Keyboard:
    """A person at a terminal of 80 columns."""

    def __init__(self, *words):
        self._terminal, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [*CHAT, *map(str, words)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            preexec_fn=_sit_at_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.seen, self._waited = b"", 0

    def wait_for(self, text, *, seconds=120):
        """Read until ``text`` has come behind what was waited for before."""
        until = time.monotonic() + seconds
        while (place := self.seen.find(text, self._waited)) < 0:
            assert time.monotonic() < until, self.seen.decode()
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    self.seen += os.read(self._terminal, 65_536)
                except OSError:
                    pytest.fail(f"it ended: {self.seen.decode()}")
        self._waited = place + len(text)

    def press(self, keys):
        os.write(self._terminal, keys)

    def ended(self):
        while True:
            try:
                self.seen += os.read(self._terminal, 65_536)
            except OSError:  # closed on the other side
                os.close(self._terminal)
                return self._process.wait()


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(endless):
    person = Keyboard(endless, "--max-new-tokens", "100000")
    person.wait_for(b"> ")
    person.press(b"What is 2 plus 3?\n")
    person.wait_for(b"plus 3?\r\n")
    person.wait_for(b" ")
    person.press(b"\x03")
    person.wait_for(b", stopped]")
    person.wait_for(b"> ")
    person.press(b"half")
    person.wait_for(b"half")
    person.press(b"\x03")
    person.wait_for(b"Ctrl-D ends")
    person.wait_for(b"> ")
    person.press(b"first line\\\n")
    person.wait_for(b"> ")
    person.press(b"\x03")
    person.wait_for(b"Ctrl-D ends")
    person.wait_for(b"> ")
    person.press(b"\x04")
    assert person.ended() == 0
    assert person.seen.endswith(b"> \r\n")
    assert b"Traceback" not in person.seen
