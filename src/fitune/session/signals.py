"""SIGINT and SIGTERM: the first lets a step be finished, the next stops at once; the exit code is the signal's own."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from fitune.spec.plan import Plan
from fitune.spec.reports import RunReport, StepReport

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""128 + the number of the signal, as shells have it."""

INTERRUPTED = EXIT_CODES[signal.SIGTERM]
"""The exit code of a rank that stops because another one was asked to."""

Handler = Callable[[int, FrameType | None], None]


class StopRequest:
    """Stop requests from signals. It is one of the run's sinks: before the first step there is nothing to finish."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._is_under_way = False

    def asked(self) -> bool:
        return bool(self.received)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[signal.Signals(self.received[0])]

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler. Raises SystemExit when the run has to stop at once."""
        if self.received or not self._is_under_way:
            stop_at_once(number, frame)
        self.received.append(number)
        _say("stopping after this step; once more stops at once")

    def start(self, plan: Plan, run_name: str) -> None:
        self._is_under_way = True

    def step(self, report: StepReport) -> None:
        return

    def finish(self, report: RunReport | None) -> None:
        self._is_under_way = False


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """A handler: everything ends as it does for any exit, with the signal's exit code."""
    _say("stopped")
    raise SystemExit(EXIT_CODES[signal.Signals(number)])


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside, signals are noted for a run that can finish its step."""
    request = StopRequest()
    with _handled_by(request.note, EXIT_CODES):
        yield request


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """Inside, SIGTERM ends the program like SIGINT does: whatever has to be closed or written down still is."""
    with _handled_by(stop_at_once, EXIT_CODES):
        yield


@contextmanager
def _handled_by(handler: Handler, numbers: dict[signal.Signals, int]) -> Iterator[None]:
    """A signal that is ignored (nohup) stays so; outside the main thread Python handles none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _say(text: str) -> None:
    """To standard error without Python's buffers: the signal may have come in the middle of a print."""
    os.write(2, f"\n{text}\n".encode())
