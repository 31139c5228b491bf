"""A tracker: a class that is told of one run, in a process of its own; it may raise whatever its library raises."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fitune.spec.plan import Tracking
from fitune.spec.reports import Status, StepReport
from fitune.spec.serial import parse_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Facts that a tracker is told before the first step."""

    run_id: str
    """Id of the run, equal for all its attempts. A tracker whose server makes the ids returns its own."""
    is_new: bool
    """False: an earlier attempt, or another program, has begun this run there."""
    name: str
    tracking: Tracking
    directory: str
    """The run's. A tracker that keeps files makes a folder of its own in it."""
    plan: str
    """JSON."""

    @property
    def settings(self) -> dict[str, str | int | float | bool]:
        """The plan's settings by dotted name, but for the matrices of the model: they follow from its shapes."""
        return {name: value for name, value in _leaves("", parse_object(self.plan)) if "linears" not in name}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Facts that a tracker is told after the last step."""

    status: Status
    figures: dict[str, float]
    """Predicted and measured, each by the name of its curve: ``predicted/peak_of_tensors``, in bytes."""
    table: tuple[tuple[str, str, str, str], ...] = ()
    """The figures in words: name, predicted, measured, error; the first row has the headings."""
    files: tuple[str, ...] = ()
    """Paths of report.html, report.json with the account of the data, plan.json and recipe.yaml."""


KILLED = End(status="interrupted", figures={})
"""The end of a run whose process is gone without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Place of the run in a tracker."""

    run_id: str
    link: str = ""
    """A page, where there is one."""
    command: str = ""
    """Shows what lies on this disk, or sends it later."""
    note: str = ""
    """A note for the user: why it is offline."""


class Tracker(Protocol):
    """One run in one tracker. The calls come in this order, in one thread."""

    def start(self, beginning: Beginning) -> Where:
        """Open the run, or go on with it where an earlier attempt made it."""
        ...

    def steps(self, reports: Sequence[StepReport]) -> None:
        """Log steps that have ended, in order; several where the tracker was behind."""
        ...

    def finish(self, end: End) -> Where:
        """Attach figures, table and files, and send all that waits."""
        ...


def _leaves(name: str, value: object) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), part)
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    elif isinstance(value, str | int | float | bool):
        yield name, value


def scalars(report: StepReport) -> Iterator[tuple[str, float]]:
    """The curves of one step, named for a tracker's ``group/name`` pages."""
    yield "train/loss", report.loss
    yield "train/learning_rate", report.learning_rate
    yield "train/grad_norm", report.grad_norm
    yield "train/loss_scale", report.loss_scale
    yield "train/skipped", float(report.skipped)
    yield "train/epoch", report.epoch
    if report.eval_loss_before is not None:
        yield "eval/loss_before", report.eval_loss_before
    if report.eval_loss is not None:
        yield "eval/loss", report.eval_loss
    yield "speed/tokens_per_second", report.tokens_per_second
    yield "speed/step_seconds", report.step_seconds
    yield "speed/data_seconds", report.data_seconds
    if report.mfu:  # 0 where the peak of the device is not known
        yield "speed/mfu", report.mfu
    for phase, peak in report.memory_bytes.items():
        yield f"memory_bytes/{phase.value}", float(peak)


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The table for pages that show Markdown."""
    if not table:
        return ""
    head, *rows = table
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))
