"""Shows what a session tells: lines as they come, bars while data or weights are read and while steps run.

Live bars for a person at a terminal, a plain line now and then in a log.
"""

import sys
import time
from collections import deque
from contextlib import ExitStack
from typing import Any, TextIO

from fitune.session.events import Event, Reading, Result, RowsAnswered, StepsBegin, StepsEnd, WeightsRead
from fitune.units import format_bytes, format_count, format_learning_rate, format_number, format_seconds
from fitune.values.reports import StepReport


class Terminal:
    """A ``Emit``. As a context manager it gives the terminal back when a bar is cut short by an error.

    Lines go to ``lines`` (standard output), bars of what is read to standard error.
    ``redrawn``: a step is written over the one before, as notebooks show it.
    """

    def __init__(self, *, lines: TextIO | None = None, redrawn: bool = False) -> None:
        self._redrawn = redrawn
        self._lines = sys.stdout if lines is None else lines
        self._bars = ExitStack()
        self._reading: ReadingBar | None = None
        self._progress: Progress | None = None
        self.result: dict[str, Any] = {}  # what ``--json`` prints

    def __call__(self, event: Event) -> None:
        match event:
            case Reading() | WeightsRead() | RowsAnswered():
                if self._reading is None:
                    self._reading = ReadingBar()
                    self._bars.callback(self._reading.close)
                if self._reading.show(event):
                    self._reading = None
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
            case _:
                if self._progress is not None:
                    self._progress.end_line()
                if self._reading is not None:
                    self._reading.close()  # what follows opens it again below the line
                print(event, file=self._lines)
                if isinstance(event, Result):
                    self.result |= event.data

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.close()
        self._reading = self._progress = None


class Progress:
    """Shows steps on standard output: live in a terminal, else every ``log_every`` steps.

    The first, the last, a skipped and an evaluated step always have a line. ``close`` gives the terminal back.
    ``redrawn``: each other step is written over the one before.
    """

    def __init__(self, *, log_every: int = 1, name: str = "train", redrawn: bool = False) -> None:
        self._redrawn, self._is_open = redrawn, False
        self._stream = sys.stdout
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


class ReadingBar:
    """How much of data or weights is read, and how many rows are answered, on standard error: a bar on a terminal, a
    line of a log every half minute.

    What is small is read before there is anything to see: a bar comes after a second.
    """

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._every_s = 0.2 if self._is_live else 30.0
        self._began = time.monotonic()
        self._due, self._is_shown = self._began + max(self._every_s, 1.0), False
        self._bar: Any = None

    def show(self, event: Reading | WeightsRead | RowsAnswered) -> bool:
        """Show how far it is, where that is due; True when all is read, and the bar is gone."""
        now = time.monotonic()
        passed = max(now - self._began, 1e-9)
        match event:
            case WeightsRead(done_bytes=done, total_bytes=total):
                doing, words, is_done = (
                    "reading weights",
                    f"{format_bytes(done)} of {format_bytes(total)}",
                    done >= total,
                )
            case RowsAnswered(done=done, total=total):
                doing, words, is_done = "answered", str(event), done >= total
            case Reading(bytes_read=done, bytes_in_all=total):
                doing, words, is_done = event.doing, format_bytes(done), event.doing == "done"
        share = min(1.0, done / total) if total else 0.0  # of data, whose rows may wait to be tokenised
        if isinstance(event, Reading) and event.rows:
            words = (
                f"{event.rows:,} rows, {format_count(event.tokens)} tokens, {event.rows / passed:,.0f} rows/s"
            )
        if not isinstance(event, RowsAnswered) and 0 < share < 1:  # which says it, of the rows of this start
            words += f", {format_seconds(passed / share - passed)} left"
        if now >= self._due or (is_done and self._is_shown):
            self._due, self._is_shown = now + self._every_s, True
            self._draw("tokenised" if doing == "done" else doing, share, words)
        if is_done:
            self.close()
        return is_done

    def _draw(self, doing: str, share: float, words: str) -> None:
        if not self._is_live:
            print(f"{doing}: {words}", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}")
            )
            self._bar = Bar(
                next(columns), BarColumn(10), *columns, console=Console(stderr=True), transient=True
            )
            self._task = self._bar.add_task(doing, total=None, note="")
            self._bar.start()
        total = 1.0 if share else None
        self._bar.update(self._task, description=doing, completed=share, total=total, note=words)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
