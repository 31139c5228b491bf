"""Handlers of the signals that end a program, set and taken back."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""128 + the number of the signal, as shells have it."""
STOPPING = "stopping after this step, or after the export where the last one is done; once more stops at once"
"""Said when the first signal comes."""


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
    numbers: Iterable[signal.Signals] = EXIT_CODES,
) -> Iterator[None]:
    """Inside, ``handler`` has the signals. One that is ignored (nohup) stays so; outside the main thread Python handles
    none."""
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
