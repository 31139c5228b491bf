"""A run read back from its directory, for reports.

plan.json must be there. Everything else may be missing: a run that failed or is still going has a report too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fitune.errors import RunDirectoryError
from fitune.files import path_fault, read_text
from fitune.report.compare import Figure, MeasuredRun, compare, measure
from fitune.track.metrics import read_metrics
from fitune.track.record import Tracked, read_tracked
from fitune.values.plan import Plan
from fitune.values.predictions import Estimate, Rejection, WholeRun
from fitune.values.reports import RunReport, StepReport
from fitune.values.run_directory import moved, require_real_files
from fitune.values.serial import from_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that was considered and not taken."""

    summary: str
    peak_bytes: int
    step_seconds: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """estimate.json: what was said before the first step. ``serial.to_json`` writes it.

    ``estimate`` is for the run's own data: memory of its heaviest micro-batch, time of its usual one.
    """

    estimate: Estimate
    heaviest_step: int = 0
    """The step (1-based) of the peak, which has the heaviest micro-batch; 0 when the data was not known."""
    heaviest_tokens: int = 0
    allowed_bytes: int = 0
    """Peak of tensors of the largest micro-batch the plan allows: what the plan was fitted by."""
    run: WholeRun | None = None
    """None in files of earlier versions."""
    runners_up: tuple[RunnerUp, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    decisions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Everything a report is made of."""

    directory: Path
    plan: Plan
    prediction: Prediction | None
    steps: tuple[StepReport, ...]
    run: RunReport | None
    """None while the run is going, and when it was killed."""
    recipe: str
    """YAML text, empty when there is none."""
    trackers: tuple[Tracked, ...] = ()

    @property
    def estimate(self) -> Estimate | None:
        """The predicted estimate; None where the run has no prediction."""
        return None if self.prediction is None else self.prediction.estimate

    @property
    def measured(self) -> MeasuredRun:
        """Measured figures, as far as the run has said them."""
        return measure(self.run, self.steps)

    @property
    def comparison(self) -> list[Figure]:
        """Predicted beside measured figures."""
        return compare(self.estimate, self.run, self.steps)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps from the first to the last; None before the data is known."""
        if self.prediction and self.prediction.run:
            return self.prediction.run.steps
        return self.steps[-1].total_steps if self.steps else None


def read_run(directory: Path, *, steps: Sequence[StepReport] | None = None) -> RunFiles:
    """Read a run directory; ``steps`` where its metrics.jsonl was read already. Raises RunDirectoryError naming the
    file that is missing or damaged."""
    if fault := path_fault(str(directory)):
        raise RunDirectoryError(fault, hint="the output_dir of a fitune run")
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: no such run directory", hint="the output_dir of a fitune run")
    require_real_files(directory)
    plan = _read(Plan, directory / "plan.json")
    if plan is None:
        raise RunDirectoryError(
            f"{directory}: no plan.json, so this is not the directory of a run",
            hint="the output_dir of a fitune run",
        )
    return RunFiles(
        directory=directory,
        plan=moved(plan, directory),
        prediction=_read(Prediction, directory / "estimate.json"),
        steps=tuple(read_metrics(directory / "metrics.jsonl") if steps is None else steps),
        run=_read(RunReport, directory / "report.json"),
        recipe=_read_text(directory / "recipe.yaml") or "",
        trackers=read_tracked(directory),
    )


def _read(cls: type[T], path: Path) -> T | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        return from_json(cls, text)
    except ValueError as error:
        raise RunDirectoryError(f"{path}: {error}", hint=_hint(path)) from None


def _read_text(path: Path) -> str | None:
    try:
        return read_text(path, follow_links=False)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RunDirectoryError(f"{path}: not UTF-8 at byte {error.start}", hint=_hint(path)) from None
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}") from None


def _hint(path: Path) -> str | None:
    return None if path.name == "plan.json" else f"move {path.name} away: the report is then made without it"
