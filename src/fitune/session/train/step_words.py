"""A step in one line for people, and how long the rest will take."""

from collections import deque

from fitune.spec.reports import StepReport
from fitune.units import format_bytes, format_learning_rate, format_number, format_seconds

WIDTH = 80
"""Columns that a line about a step never exceeds: what tells least is left out. metrics.jsonl has everything."""


class StepPace:
    """Estimates how long the rest will take, from the mean of the last steps. The first is left out: it warms up.

    Beside it the highest peak so far, for what is said of a step.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=50)
        self._steps = self._memory_bytes = 0

    def add(self, report: StepReport) -> None:
        self._memory_bytes = max(self._memory_bytes, *report.memory_bytes.values(), 0)
        if self._steps == 1:
            self._seconds.clear()
        self._steps += 1
        self._seconds.append(report.step_seconds + report.data_seconds)

    def remaining_seconds(self, report: StepReport) -> float:
        if not self._seconds:
            return 0.0
        return max(report.total_steps - report.step, 0) * sum(self._seconds) / len(self._seconds)

    def line(self, report: StepReport) -> str:
        """The step, added before, as a line of a log."""
        return step_line(report, memory_bytes=self._memory_bytes, remaining=self.remaining_seconds(report))

    def details(self, report: StepReport) -> str:
        """Everything about the step, added before, but its number."""
        return details(report, memory_bytes=self._memory_bytes, remaining=self.remaining_seconds(report))


def is_worth_a_line(report: StepReport, *, log_every: int) -> bool:
    """True for each ``log_every``-th step, the last, a skipped and an evaluated one."""
    due = report.step % log_every == 0 or report.step == report.total_steps
    return due or report.skipped or report.eval_loss is not None


def step_line(report: StepReport, *, memory_bytes: int, remaining: float) -> str:
    """``step 12/200  loss 2.314  lr 1.9e-04  grad 0.820  1,234 tok/s  412.0 MiB  42.0 s left``."""
    step = f"step {report.step:>{len(str(report.total_steps))}}/{report.total_steps}"
    return _fitted([(step, 0), *_details(report, memory_bytes, remaining)])


def details(report: StepReport, *, memory_bytes: int, remaining: float) -> str:
    """Everything about a step but its number. ``memory_bytes`` is the highest peak so far, 0 for none."""
    return _fitted(_details(report, memory_bytes, remaining))


def _details(report: StepReport, memory_bytes: int, remaining: float) -> list[tuple[str, int]]:
    """Parts of a line in order, each with its turn to be left out; 0 stays."""
    return [
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


def _fitted(parts: list[tuple[str, int]]) -> str:
    """The parts on one line of at most WIDTH columns."""
    kept = [(text, turn) for text, turn in parts if text]
    while len(line := "  ".join(text for text, _ in kept)) > WIDTH and any(turn for _, turn in kept):
        kept.remove(min((part for part in kept if part[1]), key=lambda part: part[1]))
    return line
