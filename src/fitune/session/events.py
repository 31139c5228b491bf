"""Events of a run as values: a caller is told each and shows what it likes; ``str`` gives the words."""

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.data.ledger import Reading as Reading  # an event like the others
from fitune.data.ledger import describe_ledger
from fitune.models.headers import read_header
from fitune.planner.first_screen import short_plan
from fitune.planner.whole_run import run_lines
from fitune.report.run_files import Prediction
from fitune.report.run_words import describe_retry
from fitune.session.reported import NO_EXPORT, Reported, comparison_text, outcome_data, outcome_lines
from fitune.units import format_bytes, format_seconds
from fitune.values.plan import Plan
from fitune.values.predictions import PlanReport
from fitune.values.reports import Ledger, MergedLoss, Retry, RunReport, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan that will run, in short; what is told next stands apart from it."""

    report: PlanReport

    def __str__(self) -> str:
        return f"{short_plan(self.report)}\n"


@dataclass(frozen=True, slots=True)
class Note:
    """A line for people; for programs ``data``, keys of the object that ``--json`` prints."""

    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """All rows are tokenised; the account of each part."""

    train: Ledger
    held_out: Ledger | None
    also_trained: tuple[str, ...] = ()
    """Held-out files that are trained on, too."""

    def __str__(self) -> str:
        parts = [_under_its_name("train", self.train)]
        if self.held_out is not None:
            parts.append(_under_its_name("held out", self.held_out))
        parts += [
            f"note: eval_data {path} is also trained on, so its loss says nothing about new rows"
            for path in self.also_trained
        ]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Prediction for the batches of this data, before the first step."""

    prediction: Prediction
    plan: Plan

    def __str__(self) -> str:
        said = self.prediction
        peak, allowed = said.estimate.memory.tensor_peak_bytes, said.allowed_bytes
        run = "" if said.run is None else "".join(f"{line}\n" for line in run_lines(said.run, self.plan))
        return (
            f"{run}predicted for this data: {format_bytes(peak)} at the peak, in step {said.heaviest_step:,} with "
            f"{said.heaviest_tokens:,} tokens in a micro-batch (the plan allows {format_bytes(allowed)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRead:
    """Bytes of weights that are read, and in all; told several times a second."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswered:
    """Rows that a scored model has answered, and rows in all; how many of them in these ``seconds``, and the tokens of
    those that are on the disk."""

    done: int
    total: int
    new: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        told = f"{self.done:,}/{self.total:,} rows"
        if not self.new or not self.seconds:
            return told
        left = format_seconds((self.total - self.done) * self.seconds / self.new)
        tokens = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.tokens else ""
        return f"{told}, {self.new / self.seconds:,.1f} rows/s{tokens}, {left} left"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsBegin:
    """The model is loaded; a StepReport follows for every step."""

    plan: Plan
    run_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsEnd:
    """No step follows. ``report`` is None where the run ended without one."""

    report: RunReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanOutOfMemory:
    """An attempt failed for want of memory; the next takes less."""

    retry: Retry

    def __str__(self) -> str:
        return describe_retry(self.retry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The run has ended; predicted and measured are compared."""

    reported: Reported

    def __str__(self) -> str:
        outcome = () if self.reported.run is None else outcome_lines(self.reported.run)
        return "\n".join([comparison_text(self.reported), *outcome, f"report:  {self.reported.page}"])

    @property
    def data(self) -> dict[str, Any]:
        """Keys of the object that ``--json`` prints."""
        run = self.reported.run
        return {} if run is None else outcome_data(run, self.reported.directory) | NO_EXPORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export is written, and every weight was read back and compared."""

    title: str
    path: Path
    merged_loss: MergedLoss | None

    def __str__(self) -> str:
        lines = () if self.merged_loss is None else self.merged_loss.lines()
        return "\n".join([f"{self.title + ':':8} {self.path} (verified)", *lines])

    @property
    def data(self) -> dict[str, Any]:
        """Keys of the object that ``--json`` prints; those of what is told later are empty."""
        file = min(self.path.glob("*.safetensors"))
        dtypes = Counter(tensor.dtype for tensor in read_header(file).values())
        return NO_EXPORT | {
            "exported": self.path,
            "dtype": dtypes.most_common(1)[0][0],
            "merged_loss": self.merged_loss,
        }


Result = Note | Compared | Exported
"""Events with ``data``."""
Event = (
    Planned | Note | Reading | DataRead | Predicted | WeightsRead | StepsBegin | StepReport | StepsEnd
    | RanOutOfMemory | Compared | Exported | RowsAnswered
)  # fmt: skip
Emit = Callable[[Event], None]
"""Called with each event, in the thread that works."""


def emit_weights(emit: Emit) -> Callable[[int, int], None]:
    """Tells of weights that are read: bytes so far, and in all."""
    return lambda done, total: emit(WeightsRead(done_bytes=done, total_bytes=total))


def emit_notes(emit: Emit) -> Callable[[str], None]:
    """Tells of lines for people."""
    return lambda line: emit(Note(line))


def ignore_event(_event: Event) -> None:
    """A Tell for callers that show nothing."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """A sink of a run that tells its steps as events."""

    emit: Emit

    def start(self, plan: Plan, run_name: str) -> None:
        """Tells StepsBegin."""
        self.emit(StepsBegin(plan=plan, run_name=run_name))

    def step(self, report: StepReport) -> None:
        """Tells ``report`` as it is."""
        self.emit(report)

    def finish(self, report: RunReport | None) -> None:
        """Tells StepsEnd."""
        self.emit(StepsEnd(report=report))


def _under_its_name(name: str, ledger: Ledger) -> str:
    return textwrap.indent(describe_ledger(ledger), " " * 10).replace(" " * 10, f"{name + ':':10}", 1)
