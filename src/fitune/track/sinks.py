"""Where step reports go besides metrics.jsonl. Every tracker is fed by the same StepReport."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from fitune.errors import MissingExtra, RecipeError, did_you_mean
from fitune.spec.plan import Plan
from fitune.spec.reports import RunReport, StepReport
from fitune.spec.serial import to_json

_NOT_YET = ("wandb", "mlflow", "comet")


class Sink(Protocol):
    """Something that is told how a run goes. ``finish`` gets None when the run ended without a report."""

    def start(self, plan: Plan, run_name: str) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def finish(self, report: RunReport | None) -> None: ...


def open_sinks(names: Sequence[str], directory: Path) -> list[Sink]:
    """The trackers named by ``report_to``; their files go below ``directory``.

    Raises RecipeError for a name that is unknown or not in this version, MissingExtra for a missing library.
    """
    wanted = list(dict.fromkeys(name.lower() for name in names))
    for name in wanted:
        _require_known(name)
    return [GuardedSink(TRACKERS[name](directory / name), name=name) for name in wanted if name != "none"]


def _require_known(name: str) -> None:
    if name in _NOT_YET:
        raise RecipeError(
            f"report_to: {name!r} is not in this version of fitune",
            hint="report_to: tensorboard; metrics.jsonl in the run directory is written in any case",
        )
    known = (*TRACKERS, "none")
    if name not in known:
        raise RecipeError(
            f"report_to: unknown tracker {name!r}; known are {', '.join(known)}",
            hint=did_you_mean(name, known),
        )


class GuardedSink:
    """A tracker that cannot stop the training: the first failure is a warning, then it is left out.

    Failures are what writing and sending raise (OSError covers files and sockets) and what a client
    library says about its own state; a bug of fitune's (TypeError, KeyError) still ends the run.
    """

    failures = (OSError, RuntimeError, ValueError)

    def __init__(self, sink: Sink, *, name: str) -> None:
        self.name = name
        self._sink: Sink | None = sink

    def start(self, plan: Plan, run_name: str) -> None:
        self._tell(lambda sink: sink.start(plan, run_name))

    def step(self, report: StepReport) -> None:
        self._tell(lambda sink: sink.step(report))

    def finish(self, report: RunReport | None) -> None:
        self._tell(lambda sink: sink.finish(report))

    def _tell(self, what: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            what(self._sink)
        except self.failures as error:
            self._sink = None
            warnings.warn(
                f"tracker {self.name} failed and is left out from here on: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=3,
            )


class TensorBoardSink:
    """Scalars in TensorBoard's event files, by TensorBoard's own writer: no torch, no TensorFlow.

    Not-a-number values are written as they are; TensorBoard marks them in the curve.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtra("report_to: tensorboard", extra="track") from None
        self._directory = directory
        self._event: Any = event_pb2.Event
        self._session_log: Any = event_pb2.SessionLog
        self._open: Any = EventFileWriter
        self._writer: Any = None
        self._started = False

    def start(self, plan: Plan, run_name: str) -> None:
        self._writer = self._open(
            str(self._directory), flush_secs=10
        )  # its default shows a step after two minutes
        event = self._event(wall_time=time.time(), step=0)
        for tag, text in (("run", run_name), ("plan", f"```json\n{to_json(plan)}```")):
            value = event.summary.value.add(tag=tag)
            value.metadata.plugin_data.plugin_name = "text"
            value.tensor.dtype = 7  # DT_STRING
            value.tensor.tensor_shape.dim.add(size=1)
            value.tensor.string_val.append(text.encode())
        self._writer.add_event(event)

    def step(self, report: StepReport) -> None:
        if not self._started:
            self._forget_steps_from(report.step)
        event = self._event(wall_time=time.time(), step=report.step)
        for tag, number in scalars(report):
            event.summary.value.add(tag=tag, simple_value=number)
        self._writer.add_event(event)

    def finish(self, report: RunReport | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def _forget_steps_from(self, step: int) -> None:
        """A resumed run writes some steps again: tell TensorBoard to purge the older ones."""
        self._started = True
        start = self._session_log(status=self._session_log.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=start))


TRACKERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoardSink}
"""Name in ``report_to`` -> what makes it from the folder its files go to."""


def scalars(report: StepReport) -> Iterator[tuple[str, float]]:
    """The curves of one step, named for a tracker's ``group/name`` pages."""
    yield "train/loss", report.loss
    yield "train/learning_rate", report.learning_rate
    yield "train/grad_norm", report.grad_norm
    yield "train/loss_scale", report.loss_scale
    yield "train/skipped", float(report.skipped)
    yield "train/epoch", report.epoch
    if report.eval_loss is not None:
        yield "eval/loss", report.eval_loss
    yield "speed/tokens_per_second", report.tokens_per_second
    yield "speed/step_seconds", report.step_seconds
    yield "speed/data_seconds", report.data_seconds
    yield "speed/mfu", report.mfu
    for phase, peak in report.memory_bytes.items():
        yield f"memory_bytes/{phase.value}", float(peak)
