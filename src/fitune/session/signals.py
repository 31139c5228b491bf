"""SIGINT, SIGTERM and SIGHUP: the first lets a step be finished, the next stops at once; the exit code is the signal's
own."""

import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from fitune.launch.signals import EXIT_CODES, STOPPING, handled_by
from fitune.values.rank_status import LAUNCHER

if TYPE_CHECKING:  # every command has this file, and most have no use for those
    from fitune.values.plan import Plan
    from fitune.values.reports import RunReport, StepReport

INTERRUPTED = EXIT_CODES[signal.SIGTERM]
"""The exit code of a rank that stops because another one was asked to."""


class StopRequest:
    """Stop requests from signals. It is one of the run's sinks: before the first step there is nothing to finish."""

    def __init__(self, *, together_seconds: float = 0.0) -> None:
        self.received: list[int] = []
        self._is_under_way = False
        self._together_seconds, self._first_at = together_seconds, 0.0

    def asked(self) -> bool:
        """True once a signal has come."""
        return bool(self.received)

    @property
    def exit_code(self) -> int:
        """The exit code of the first signal. Raises IndexError before one has come."""
        return EXIT_CODES[signal.Signals(self.received[0])]

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. Raises SystemExit when the run has to stop at once."""
        if self.received and time.monotonic() - self._first_at < self._together_seconds:
            return
        if self.received or not self._is_under_way:
            stop_at_once(number, frame)
        self.received.append(number)
        self._first_at = time.monotonic()
        if number == signal.SIGHUP:
            leave_terminal()
        _say(STOPPING)

    def start(self, plan: "Plan", run_name: str) -> None:
        """From here on the first signal lets a step be finished."""
        self._is_under_way = True

    def step(self, report: "StepReport") -> None:
        """Does nothing."""
        return

    def finish(self, report: "RunReport | None") -> None:
        """From here on the next signal stops at once again."""
        self._is_under_way = False


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """A handler: everything ends as it does for any exit, with the signal's exit code."""
    if number == signal.SIGHUP:
        leave_terminal()
    _say("stopped")
    if LAUNCHER in os.environ:  # in a callback of C nothing can be raised, and Python would print a traceback
        sys.unraisablehook = lambda ignored: None
    raise SystemExit(EXIT_CODES[signal.Signals(number)])


@contextmanager
def stop_requests(*, together_seconds: float = 0.0) -> Iterator[StopRequest]:
    """Inside, signals are noted for a run that can finish its step. Those within ``together_seconds`` are one."""
    request = StopRequest(together_seconds=together_seconds)
    with handled_by(request.note):
        yield request


def exits_on_signals() -> AbstractContextManager[None]:
    """Inside, SIGTERM ends the program like SIGINT does: whatever has to be closed or written down still is."""
    return handled_by(stop_at_once)


@contextmanager
def quiet_stop() -> Iterator[threading.Event]:
    """Inside, a signal only sets the event that this gives: for what has nothing to finish and nothing to say."""
    stopped = threading.Event()
    with handled_by(lambda number, frame: stopped.set()):
        yield stopped


def keyboard_interrupts() -> AbstractContextManager[None]:
    """Inside, SIGINT raises KeyboardInterrupt, for programs that go on after it."""
    return handled_by(signal.default_int_handler, [signal.SIGINT])


def typed_line(prompt: str) -> str:
    """The next line from the terminal. Raises EOFError at its end, and KeyboardInterrupt for a Ctrl-C.

    Python's ``input`` sees a Ctrl-C that comes just before it waits only with the next key: here the signal itself
    ends the waiting, whenever it comes.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        sys.stdout.write(prompt)
        sys.stdout.flush()
        select.select([sys.stdin, woken], [], [])
        if line := sys.stdin.readline():
            return line
        raise EOFError
    finally:
        signal.set_wakeup_fd(before)
        os.close(wake)
        os.close(woken)


@contextmanager
def ended_by_signals() -> Iterator[ExitStack]:
    """Until what it gives is closed, SIGTERM ends the process as the system does.

    A rank that waits in torch for others to join has nothing to save, and Python's handlers do not run there.
    """
    with ExitStack() as stack:
        stack.enter_context(handled_by(signal.SIG_DFL, [signal.SIGTERM]))
        yield stack


def leave_terminal() -> None:
    """Let what is printed to a terminal go nowhere: after a hang-up it would be an error, and the run still saves."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def _say(text: str) -> None:
    """Writes to standard error without Python's buffers: the signal may have come in the middle of a print.

    A rank is silent: its launcher says it, and stops it with a signal when another rank failed.
    """
    if LAUNCHER in os.environ:
        return
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def end_with_launcher() -> None:
    """Ask the system for a SIGTERM to this rank when the program that started it dies, even by kill -9.

    Linux only (man 2 prctl, PR_SET_PDEATHSIG); elsewhere the ranks of a launcher that was killed train to their end.
    """
    if sys.platform == "linux":
        import ctypes  # ranks alone come here

        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal.SIGTERM), 0, 0, 0)
        if str(os.getppid()) != os.environ.get(LAUNCHER, str(os.getppid())):  # it died before
            raise SystemExit(EXIT_CODES[signal.SIGTERM])
