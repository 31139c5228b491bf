"""How far the reading of weights and of data is: bars for a person at a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from fitune.session.events import Reading
from fitune.units import format_bytes, format_count, format_seconds

Show = Callable[[Reading], None]

_BAR_EVERY_S, _LINE_EVERY_S = 0.2, 30.0
_SHOWN_AFTER_S = 1.0
"""Small data is read before there is anything to see."""


@contextmanager
def loading_bar(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes on standard error, from the first tensor to the last. Yields what is told bytes read and in all.

    The terminal is given back when loading fails half-way, too.
    """
    stream = sys.stderr if stream is None else stream
    if quiet or not stream.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    text = TextColumn("reading weights")
    bar = Progress(
        text, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=Console(file=stream), transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def reading_bar(
    *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Show]:
    """Yields what is told how far it is. The bar is on standard error, and gone when the data is read.

    The terminal is given back when reading fails half-way, too.
    """
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield _every(_LINE_EVERY_S, _Lines(stream, clock).show, clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=stream), transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=None, note="")
    pace = Pace(clock)

    def show(reading: Reading) -> None:
        if reading.doing == "done":
            bar.stop()
            return
        bar.start()
        share = pace.share(reading)
        bar.update(
            task, description=reading.doing, completed=share, total=1.0 if share else None, note=pace.words(reading)
        )  # fmt: skip

    try:
        yield _every(_BAR_EVERY_S, show, clock)
    finally:
        bar.stop()


class _Lines:
    """A line at a time, for a log."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        self._stream, self._pace = stream, Pace(clock)

    def show(self, reading: Reading) -> None:
        what = "tokenised" if reading.doing == "done" else reading.doing
        print(f"{what}: {self._pace.words(reading)}", file=self._stream, flush=True)


class Pace:
    """Rows a second and the time that is left, since the first row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()

    @staticmethod
    def share(reading: Reading) -> float:
        """Share of all bytes that was read, 0 where the whole is not known; their rows may wait to be tokenised."""
        return min(1.0, reading.bytes_read / reading.bytes_in_all) if reading.bytes_in_all else 0.0

    def words(self, reading: Reading) -> str:
        """``400,000 rows, 21.0 M tokens, 12,345 rows/s, 2 min left``."""
        if not reading.rows:
            return format_bytes(reading.bytes_read)
        passed = max(self._clock() - self._began, 1e-9)
        share = self.share(reading)
        left = f", {format_seconds(passed / share - passed)} left" if 0 < share < 1 else ""
        rate = f"{reading.rows / passed:,.0f} rows/s"
        return f"{reading.rows:,} rows, {format_count(reading.tokens)} tokens, {rate}{left}"


def _every(seconds: float, show: Show, clock: Callable[[], float]) -> Show:
    """``show`` at most once in so many seconds, and not at once."""
    due, shown = clock() + max(seconds, _SHOWN_AFTER_S), False

    def told(reading: Reading) -> None:
        nonlocal due, shown
        if clock() >= due or (reading.doing == "done" and shown):
            due, shown = clock() + seconds, True
            show(reading)

    return told
