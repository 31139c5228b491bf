"""The table of trackers, and what ``report_to`` is refused for before a run begins. Nothing of theirs is imported."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fitune.credentials import credential_in
from fitune.errors import MissingExtra, RecipeError, did_you_mean
from fitune.values.plan import Tracking
from fitune.values.reports import Status, StepReport
from fitune.values.serial import parse_object

NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRow:
    """One tracker."""

    tracker: str
    """``module:Class``, imported in the tracker's process alone."""
    library: str
    """The module that has to be installed."""
    extra: str
    prefix: str = ""
    """Its environment variables begin so."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For its process, unless the user has said otherwise: nothing is sent but the run."""


TRACKERS: dict[str, TrackerRow] = {
    "wandb": TrackerRow(
        tracker="fitune.track.wandb:Wandb", library="wandb", extra="wandb", prefix="WANDB_",
        environment={"WANDB_ERROR_REPORTING": "false"},
    ),
    "mlflow": TrackerRow(
        tracker="fitune.track.mlflow:MLflow", library="mlflow", extra="mlflow", prefix="MLFLOW_",
        environment={"MLFLOW_DISABLE_TELEMETRY": "true"},
    ),
    "comet": TrackerRow(
        tracker="fitune.track.comet:Comet", library="comet_ml", extra="comet", prefix="COMET_",
        environment={"COMET_ERROR_TRACKING_ENABLE": "false", "COMET_DISABLE_AUTO_LOGGING": "1"},
    ),
    "tensorboard": TrackerRow(
        tracker="fitune.track.tensorboard:TensorBoard", library="tensorboard", extra="tensorboard"
    ),
}  # fmt: skip
"""Name in ``report_to`` -> tracker."""

_ALIASES = {"comet_ml": "comet"}
_ALL = "all"


def wanted_trackers(names: Sequence[str]) -> dict[str, TrackerRow]:
    """The trackers that ``report_to`` names. ``all`` is every one that is installed, ``none`` is none.

    Raises RecipeError for an unknown name, MissingExtra for a library that is not installed.
    """
    named = list(dict.fromkeys(_ALIASES.get(name.lower(), name.lower()) for name in names))
    if NONE in named:
        if len(named) > 1:
            raise RecipeError(f"report_to: {', '.join(names)}: none goes with no other")
        return {}
    wants_all = _ALL in named
    named = [name for name in named if name != _ALL]
    for name in named:
        if name not in TRACKERS:
            known = (*TRACKERS, NONE)
            raise RecipeError(
                f"report_to: unknown tracker {name!r}; known are {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
        if not _is_installed(TRACKERS[name].library):
            error = MissingExtra(f"report_to: {name}", extra=TRACKERS[name].extra)
            error.hint = f"{error.hint}, or report_to: none; metrics.jsonl has every step in any case"
            raise error
    if wants_all:
        return {name: row for name, row in TRACKERS.items() if _is_installed(row.library)}
    return {name: TRACKERS[name] for name in named}


def _is_installed(module: str) -> bool:
    """False also for a mere folder of that name: wandb makes one where it runs."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def settings_of_environment(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """The trackers' variables that another machine may be told; keys, and addresses with a password, stay here."""
    prefixes = tuple(row.prefix for row in TRACKERS.values() if row.prefix)
    for name, value in environment.items():
        is_secret = any(part in name for part in ("KEY", "TOKEN", "PASSWORD", "SECRET")) or credential_in(
            value
        )
        if name.startswith(prefixes) and not is_secret:
            yield name, value


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
        """The plan's settings by dotted name."""
        return dict(plan_settings(parse_object(self.plan)))


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


def plan_settings(value: object, name: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """The settings of a plan's data by dotted name, but for the matrices of the model: they follow from its shapes."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key != "linears":
                yield from plan_settings(part, f"{name}.{key}" if name else str(key))
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
