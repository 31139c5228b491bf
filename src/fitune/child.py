"""Processes beside this one that answer messages. They end with it, however it ends, and never stop it from ending."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import fitune

WAKE_S = 0.2
"""Seconds of waiting before ``beat`` is called: a stop that is asked for is seen in this time."""
_END_S = 10.0
"""Seconds in which a process whose pipe is closed ends by itself, also on a busy machine: its exit code says why."""

Beat = Callable[[], None]


def nothing() -> None:
    """A beat for callers that never stop."""


class ChildEnded(Exception):
    """The process is gone before it answered; ``how`` says it for people."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        super().__init__(self.how)


class Child:
    """``python -m module`` with a pipe of messages, whose number is its first argument; ``arguments`` follow.

    A new program, not a fork: torch and tokenizers have threads, which a fork would leave behind in the middle of
    what they did. It sees no signal of the terminal. It ends when the pipe closes, so also when this process
    is killed. ``environment`` counts where this process has no such variable. What it prints goes to ``log``.
    """

    def __init__(
        self, module: str, *arguments: str, beat: Beat = nothing, environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:  # fmt: skip
        self._beat = beat
        self._connection, theirs = Pipe()
        paths = [str(Path(fitune.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={
                    **(environment or {}), **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
                    "ARROW_DEFAULT_MEMORY_POOL": "system",
                },
            )  # fmt: skip

    def send(self, message: bytes) -> None:
        """Raises ChildEnded."""
        try:
            self._connection.send_bytes(message)
        except OSError:
            raise self._ended() from None

    def receive(self) -> bytes:
        """The next message. Calls ``beat`` while it waits. Raises ChildEnded."""
        try:
            while not self._connection.poll(WAKE_S):
                self._beat()
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> ChildEnded:
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return ChildEnded(self._process.wait(timeout=_END_S))
        self._process.kill()
        return ChildEnded(self._process.wait())

    def kill(self) -> None:
        """End the process and all that it started at once, also from another thread than the one that waits."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """``kill``, and wait until it is gone."""
        self._connection.close()
        self.kill()
        self._process.wait()


def requests(arguments: Sequence[str], *, lonely_s: float = 0.0) -> Iterator[tuple[Connection, bytes]]:
    """Yields, in the child, the pipe and each message of its parent.

    A thread takes them from the pipe, so that the parent never waits for that. When the parent is gone, the process
    ends in the middle of what it does; with ``lonely_s`` the messages end first, and the process so many seconds later.
    """
    connection = Connection(int(arguments[1]))
    received: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        """Queues the parent's messages; after the pipe closes, ends the process with code 0, ``lonely_s`` later."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                received.put(connection.recv_bytes())
        if lonely_s:
            received.put(None)
            time.sleep(lonely_s)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while (message := received.get()) is not None:
        yield connection, message
