"""Shows what a session tells: lines as they come, bars while data or weights are read and while steps run."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TextIO

from fitune.cli.bars import loading_bar, reading_bar
from fitune.cli.progress import Progress
from fitune.session.events import Event, Reading, RowsAnswered, StepsBegin, StepsEnd, WeightsRead
from fitune.spec.plan import Plan
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
                self._begin(event.plan, event.run_name)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _read(self, reading: Reading) -> None:
        if self._show_reading is None:
            self._show_reading = self._bars.enter_context(reading_bar())
        self._show_reading(reading)

    def _load(self, read: WeightsRead) -> None:
        if self._show_weights is None:
            self._show_weights = self._bars.enter_context(loading_bar(quiet=self._quiet))
        self._show_weights(read.done_bytes, read.total_bytes)

    def _begin(self, plan: Plan, run_name: str) -> None:
        self._progress = Progress(log_every=plan.run.log_every)
        self._bars.callback(self._progress.finish, None)
        self._progress.start(plan, run_name)

    def _close(self) -> None:
        self._bars.close()
        self._show_reading = self._show_weights = self._progress = None


def _count_rows(rows: RowsAnswered) -> None:
    """Rows done on one line of a terminal; nothing where nobody watches."""
    if sys.stderr.isatty():
        end = "\n" if rows.done == rows.total else ""
        print(f"\r{rows.done}/{rows.total} rows", end=end, file=sys.stderr, flush=True)
