"""Shows what a session tells: lines as they come, bars while data or weights are read and while steps run.

Live bars for a person at a terminal, a plain line now and then in a log.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from fitune.session.events import Event, Reading, RowsAnswered, StepsBegin, StepsEnd, WeightsRead
from fitune.session.train.reading_words import ReadingPace, Show, at_most_every
from fitune.session.train.step_words import StepPace, is_worth_a_line
from fitune.spec.reports import StepReport


class Terminal:
    """A ``Tell``. As a context manager it gives the terminal back when a bar is cut short by an error.

    Lines go to ``lines`` (standard output), bars of what is read to standard error; ``quiet`` draws no bar of weights.
    """

    def __init__(self, *, lines: TextIO | None = None, quiet: bool = False) -> None:
        self._lines = sys.stdout if lines is None else lines
        self._quiet = quiet
        self._bars = ExitStack()
        self._show_reading: Callable[[Reading], None] | None = None
        self._show_weights: Callable[[int, int], None] | None = None
        self._progress: Progress | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Reading():
                self._read(event)
            case WeightsRead():
                self._load(event)
            case StepsBegin():
                self._begin(event)
            case StepReport():
                if self._progress is not None:
                    self._progress.step(event)
            case StepsEnd():
                self._close()
            case RowsAnswered():
                _count_rows(event)
            case _:
                print(event, file=self._lines)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_error: object) -> None:
        self._close()

    def _read(self, reading: Reading) -> None:
        if self._show_reading is None:
            self._show_reading = self._bars.enter_context(reading_bar())
        self._show_reading(reading)

    def _load(self, read: WeightsRead) -> None:
        if self._show_weights is None:
            self._show_weights = self._bars.enter_context(loading_bar(quiet=self._quiet))
        self._show_weights(read.done_bytes, read.total_bytes)

    def _begin(self, event: StepsBegin) -> None:
        self._progress = Progress(log_every=event.plan.run.log_every)
        self._bars.callback(self._progress.close)
        self._progress.start(event.run_name)

    def _close(self) -> None:
        self._bars.close()
        self._show_reading = self._show_weights = self._progress = None


def _count_rows(rows: RowsAnswered) -> None:
    """Rows done on one line of a terminal; a line now and then in a log."""
    if sys.stderr.isatty():
        end = "\n" if rows.done == rows.total else ""
        print(f"\r{rows!s:<72}", end=end, file=sys.stderr, flush=True)
    elif rows.is_due:
        print(rows, file=sys.stderr, flush=True)


class Progress:
    """Shows steps on ``stream`` (standard output): live in a terminal, else every ``log_every`` steps.

    The first, the last, a skipped and an evaluated step are always printed. ``close`` gives the terminal back.
    """

    def __init__(self, *, log_every: int = 1, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._log_every = max(log_every, 1)
        self._pace = StepPace()
        self._first = True
        self._bar = _LiveBar(self._stream) if self._stream.isatty() else None

    def start(self, run_name: str) -> None:
        if self._bar is not None:
            self._bar.start(run_name)

    def step(self, report: StepReport) -> None:
        self._pace.add(report)
        if self._bar is not None:
            self._bar.update(report, note=self._pace.details(report), line=self._pace.line(report))
        elif self._first or is_worth_a_line(report, log_every=self._log_every):
            print(self._pace.line(report), file=self._stream, flush=True)
        self._first = False

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _LiveBar:
    """A bar with a line of numbers below it, drawn by rich; evaluated steps stay on the screen above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        self._console = Console(file=stream, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
        )
        self._note = Text("", no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._note), console=self._console, refresh_per_second=4)
        self._task: Any = None

    def start(self, run_name: str) -> None:
        self._task = self._bar.add_task(run_name, total=None)
        self._live.start()

    def update(self, report: StepReport, *, note: str, line: str) -> None:
        if self._task is None:
            self.start("train")
        self._bar.update(self._task, completed=report.step, total=report.total_steps)
        self._note.plain = note
        if report.eval_loss is not None or report.skipped:
            self._console.print(line, markup=False, no_wrap=True, overflow="ellipsis")

    def stop(self) -> None:
        self._live.stop()


def print_coloured(screen: str) -> None:
    """The screen; on a terminal with its verdict and its bar in colour."""
    if not sys.stdout.isatty():
        print(screen)
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(screen)
    text.highlight_regex(r"✔ FITS|[█▏▎▍▌▋▊▉]+(?=[█▏▎▍▌▋▊▉·]*.* to spare)", "bold green")
    text.highlight_regex(r"✘ DOES NOT FIT|█+(?=.* short)", "bold red")
    text.highlight_regex(r"^  [A-Z][a-z ]+(?=  )", "bold")
    Console(highlight=False, soft_wrap=True).print(text)


_BAR_EVERY_S, _LINE_EVERY_S = 0.2, 30.0


@contextmanager
def loading_bar(*, quiet: bool, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes on standard error while weights are read. Yields what is told bytes that were read, and all."""
    stream = sys.stderr if stream is None else stream
    if quiet or not stream.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    doing, size = TextColumn("reading weights"), DownloadColumn(binary_units=True)
    with _transient_bar(stream, doing, BarColumn(30), size, TransferSpeedColumn()) as (bar, task):

        def show(done: int, total: int) -> None:
            bar.start()
            bar.update(task, completed=done, total=total)
            if done >= total:
                bar.stop()

        yield show


@contextmanager
def reading_bar() -> Iterator[Show]:
    """Yields what is told how far it is. The bar is on standard error, and gone when the data is read."""
    stream, pace = sys.stderr, ReadingPace(time.monotonic)

    def print_line(reading: Reading) -> None:
        print(pace.line(reading), file=stream, flush=True)

    if not stream.isatty():
        yield at_most_every(_LINE_EVERY_S, print_line, time.monotonic)
        return
    from rich.progress import BarColumn, TextColumn

    doing, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
    with _transient_bar(stream, doing, BarColumn(10), note) as (bar, task):

        def show(reading: Reading) -> None:
            if reading.doing == "done":
                bar.stop()
                return
            bar.start()
            share, words = pace.share(reading), pace.words(reading)
            total = 1.0 if share else None
            bar.update(task, description=reading.doing, completed=share, total=total, note=words)

        yield at_most_every(_BAR_EVERY_S, show, time.monotonic)


@contextmanager
def _transient_bar(stream: TextIO, *columns: Any) -> Iterator[tuple[Any, Any]]:
    """A bar that leaves nothing on the screen, and its one task. The terminal is given back after an error, too."""
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(*columns, console=Console(file=stream), transient=True)
    try:
        yield bar, bar.add_task("", total=None, note="")
    finally:
        bar.stop()
