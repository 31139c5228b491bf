"""Shows what a session tells: lines as they come, bars while data or weights are read and while steps run.

Live bars for a person at a terminal, a plain line now and then in a log.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from fitune.session.events import Event, Reading, Result, RowsAnswered, StepsBegin, StepsEnd, WeightsRead
from fitune.units import format_bytes, format_count, format_learning_rate, format_number, format_seconds
from fitune.values.reports import StepReport


class Terminal:
    """A ``Emit``. As a context manager it gives the terminal back when a bar is cut short by an error.

    Lines go to ``lines`` (standard output), bars of what is read to standard error; ``quiet`` draws no bar of weights.
    ``redrawn``: a step is written over the one before, as notebooks show it.
    """

    def __init__(self, *, lines: TextIO | None = None, quiet: bool = False, redrawn: bool = False) -> None:
        self._redrawn = redrawn
        self._lines = sys.stdout if lines is None else lines
        self._quiet = quiet
        self._bars = ExitStack()
        self._show_reading: Callable[[Reading], None] | None = None
        self._show_weights: Callable[[int, int], None] | None = None
        self._progress: Progress | None = None
        self.result: dict[str, Any] = {}  # what ``--json`` prints

    def __call__(self, event: Event) -> None:
        match event:
            case Reading():
                if self._show_reading is None:
                    self._show_reading = self._bars.enter_context(reading_bar())
                self._show_reading(event)
            case WeightsRead():
                if self._show_weights is None:
                    self._show_weights = self._bars.enter_context(loading_bar(quiet=self._quiet))
                self._show_weights(event.done_bytes, event.total_bytes)
            case StepsBegin():
                self._progress = Progress(
                    log_every=event.plan.run.log_every, name=event.run_name, redrawn=self._redrawn
                )
                self._bars.callback(self._progress.close)
            case StepReport():
                if self._progress is not None:
                    self._progress.step(event)
            case StepsEnd():
                self.__exit__()
            case RowsAnswered():
                if sys.stderr.isatty():
                    end = "\n" if event.done == event.total else ""
                    print(f"\r{event!s:<72}", end=end, file=sys.stderr, flush=True)
                elif event.is_due:
                    print(event, file=sys.stderr, flush=True)
            case _:
                if self._progress is not None:
                    self._progress.end_line()
                print(event, file=self._lines)
                if isinstance(event, Result):
                    self.result |= event.data

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.close()
        self._show_reading = self._show_weights = self._progress = None


class Progress:
    """Shows steps on ``stream`` (standard output): live in a terminal, else every ``log_every`` steps.

    The first, the last, a skipped and an evaluated step always have a line. ``close`` gives the terminal back.
    ``redrawn``: each other step is written over the one before.
    """

    def __init__(
        self, *, log_every: int = 1, name: str = "train", stream: TextIO | None = None, redrawn: bool = False
    ) -> None:
        self._redrawn, self._is_open = redrawn, False
        self._stream = sys.stdout if stream is None else stream
        self._log_every = max(log_every, 1)
        self._seconds: deque[float] = deque(maxlen=50)
        self._steps = self._memory_bytes = 0
        self._live: Any = None
        if self._stream.isatty():
            from rich.console import Console, Group
            from rich.live import Live
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.text import Text

            self._bar = Bar(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._task = self._bar.add_task(name, total=None)
            self._note = Text("", no_wrap=True, overflow="ellipsis")
            console = Console(file=self._stream, highlight=False)
            self._live = Live(Group(self._bar, self._note), console=console, refresh_per_second=4)
            self._live.start()

    def step(self, report: StepReport) -> None:
        """Show the step, with the time left by the mean of the last steps; the first of them only warms up."""
        if self._steps == 1:
            self._seconds.clear()
        self._steps += 1
        self._seconds.append(report.step_seconds + report.data_seconds)
        self._memory_bytes = max(self._memory_bytes, *report.memory_bytes.values(), 0)
        left = max(report.total_steps - report.step, 0) * sum(self._seconds) / len(self._seconds)
        of_run: dict[str, Any] = {"memory_bytes": self._memory_bytes, "remaining": left}
        line = step_line(report, **of_run)
        is_odd = report.skipped or report.eval_loss is not None
        is_at_an_end = self._steps == 1 or report.step == report.total_steps
        if self._live is not None:
            self._bar.update(self._task, completed=report.step, total=report.total_steps)
            self._note.plain = step_line(report, **of_run, number=False)
            if is_odd:
                self._live.console.print(line, markup=False, no_wrap=True, overflow="ellipsis")
        elif self._redrawn:
            self._is_open = not (is_odd or is_at_an_end)
            print(f"\r{line:<80}", end="" if self._is_open else "\n", file=self._stream, flush=True)
        elif is_odd or is_at_an_end or not report.step % self._log_every:
            print(line, file=self._stream, flush=True)

    def end_line(self) -> None:
        """End the line of a step that the next one would be written over."""
        if self._is_open:
            print(file=self._stream)
        self._is_open = False

    def close(self) -> None:
        """Give the terminal back."""
        self.end_line()
        if self._live is not None:
            self._live.stop()


def step_line(report: StepReport, *, memory_bytes: int, remaining: float, number: bool = True) -> str:
    """``step 12/200  loss 2.314  lr 1.9e-04  grad 0.820  1,234 tok/s  412.0 MiB  42.0 s left``, at most 80 columns.

    What tells least is left out; metrics.jsonl has everything. ``memory_bytes`` is the highest peak so far, 0 for none.
    """
    step = f"step {report.step:>{len(str(report.total_steps))}}/{report.total_steps}" if number else ""
    parts = [  # each with its turn to be left out; 0 stays
        (step, 0),
        (f"loss {format_number(report.loss)}", 0),
        (f"eval {format_number(report.eval_loss)}" if report.eval_loss is not None else "", 0),
        (f"skipped, loss scale {report.loss_scale:g}" if report.skipped else "", 0),
        (f"lr {format_learning_rate(report.learning_rate)}", 2),
        (f"grad {format_number(report.grad_norm, digits=3)}", 3),
        (f"{report.tokens_per_second:,.0f} tok/s", 5),
        (format_bytes(memory_bytes) if memory_bytes else "", 4),
        (f"{format_seconds(remaining)} left" if remaining else "", 6),
        (f"epoch {report.epoch:.2f}", 1),
    ]
    kept = [part for part in parts if part[0]]
    while len(line := "  ".join(text for text, _ in kept)) > 80 and any(turn for _, turn in kept):
        kept.remove(min((part for part in kept if part[1]), key=lambda part: part[1]))
    return line


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
            """Draws ``done`` of ``total`` bytes; the bar stops when all are read."""
            bar.start()
            bar.update(task, completed=done, total=total)
            if done >= total:
                bar.stop()

        yield show


@contextmanager
def reading_bar() -> Iterator[Callable[[Reading], None]]:
    """Yields what is told how far it is. The bar is on standard error, and gone when the data is read.

    Small data is read before there is anything to see: a bar comes after a second, a line of a log after half a minute.
    """
    stream, began = sys.stderr, time.monotonic()
    is_live = stream.isatty()
    every_s = 0.2 if is_live else 30.0
    due, is_shown = began + max(every_s, 1.0), False

    def told(reading: Reading) -> None:
        """Shows progress at most every ``every_s`` seconds: a bar on a terminal, else a line."""
        nonlocal due, is_shown
        now, is_done = time.monotonic(), reading.doing == "done"
        if now < due and not (is_done and is_shown):
            return
        due, is_shown = now + every_s, True
        # the share of all bytes that was read, whose rows may wait to be tokenised
        share = min(1.0, reading.bytes_read / reading.bytes_in_all) if reading.bytes_in_all else 0.0
        words = format_bytes(reading.bytes_read)
        if reading.rows:
            passed = max(now - began, 1e-9)
            left = f", {format_seconds(passed / share - passed)} left" if 0 < share < 1 else ""
            count = f"{reading.rows:,} rows, {format_count(reading.tokens)} tokens"
            words = f"{count}, {reading.rows / passed:,.0f} rows/s{left}"
        if not is_live:
            print(f"{'tokenised' if is_done else reading.doing}: {words}", file=stream, flush=True)
        elif is_done:
            bar.stop()
        else:
            bar.start()
            bar.update(
                task, description=reading.doing, completed=share, total=1.0 if share else None, note=words
            )

    if not is_live:
        yield told
        return
    from rich.progress import BarColumn, TextColumn

    doing, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
    with _transient_bar(stream, doing, BarColumn(10), note) as (bar, task):
        yield told


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
