"""What a person watching a run sees: a live bar in a terminal, plain lines anywhere else."""

import sys
from collections import deque
from types import TracebackType
from typing import Any, TextIO

from fitune.spec.plan import Plan
from fitune.spec.reports import RunReport, StepReport
from fitune.units import format_bytes, format_learning_rate, format_number, format_rate, format_seconds


class Progress:
    """Shows steps on ``stream`` (standard output): live in a terminal, else every ``log_every`` steps.

    The first, the last, a skipped and an evaluated step are always printed. A Sink like any tracker, and a
    context manager, so that the terminal is given back when training raises.
    """

    def __init__(self, *, log_every: int = 1, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._log_every = max(log_every, 1)
        self._pace = Pace()
        self._memory_bytes = 0
        self._first = True
        self._bar = _LiveBar(self._stream) if self._stream.isatty() else None

    def start(self, plan: Plan, run_name: str) -> None:
        if self._bar is not None:
            self._bar.start(run_name)

    def step(self, report: StepReport) -> None:
        self._pace.add(report)
        self._memory_bytes = max(self._memory_bytes, *report.memory_bytes.values(), 0)
        remaining = self._pace.remaining_seconds(report)
        if self._bar is not None:
            self._bar.update(report, details(report, memory_bytes=self._memory_bytes, remaining=remaining))
        elif self._first or self._is_worth_a_line(report):
            print(
                step_line(report, memory_bytes=self._memory_bytes, remaining=remaining),
                file=self._stream,
                flush=True,
            )
        self._first = False

    def finish(self, report: RunReport | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(None)

    def _is_worth_a_line(self, report: StepReport) -> bool:
        due = report.step % self._log_every == 0 or report.step == report.total_steps
        return due or report.skipped or report.eval_loss is not None


class Pace:
    """How long the rest will take, from the mean of the last steps. The first is left out: it warms up."""

    def __init__(self, *, window: int = 50) -> None:
        self._seconds: deque[float] = deque(maxlen=window)
        self._steps = 0

    def add(self, report: StepReport) -> None:
        if self._steps == 1:
            self._seconds.clear()
        self._steps += 1
        self._seconds.append(report.step_seconds + report.data_seconds)

    def remaining_seconds(self, report: StepReport) -> float:
        if not self._seconds:
            return 0.0
        return max(report.total_steps - report.step, 0) * sum(self._seconds) / len(self._seconds)


def step_line(report: StepReport, *, memory_bytes: int, remaining: float) -> str:
    """``step 12/200  loss 2.314  lr 1.9e-04  grad 0.820  1,234 tokens/s  mem 412.0 MiB  eta 42.0 s …``."""
    width = len(str(report.total_steps))
    rest = details(report, memory_bytes=memory_bytes, remaining=remaining)
    return f"step {report.step:>{width}}/{report.total_steps}  {rest}"


def details(report: StepReport, *, memory_bytes: int, remaining: float) -> str:
    """Everything about a step but its number. ``memory_bytes`` is the highest peak so far, 0 for none."""
    parts = [
        f"loss {format_number(report.loss)}",
        f"eval {format_number(report.eval_loss)}" if report.eval_loss is not None else "",
        f"lr {format_learning_rate(report.learning_rate)}",
        f"grad {format_number(report.grad_norm, digits=3)}",
        f"skipped, loss scale {report.loss_scale:g}" if report.skipped else "",
        format_rate(report.tokens_per_second),
        f"mem {format_bytes(memory_bytes)}" if memory_bytes else "",
        f"eta {format_seconds(remaining)}" if remaining else "",
        f"epoch {report.epoch:.2f}",
    ]
    return "  ".join(part for part in parts if part)


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
        self._note = Text("")
        self._live = Live(Group(self._bar, self._note), console=self._console, refresh_per_second=4)
        self._task: Any = None

    def start(self, run_name: str) -> None:
        self._task = self._bar.add_task(run_name, total=None)
        self._live.start()

    def update(self, report: StepReport, note: str) -> None:
        if self._task is None:
            self.start("train")
        self._bar.update(self._task, completed=report.step, total=report.total_steps)
        self._note.plain = note
        if report.eval_loss is not None or report.skipped:
            self._console.print(f"step {report.step}/{report.total_steps}  {note}", markup=False)

    def stop(self) -> None:
        self._live.stop()
