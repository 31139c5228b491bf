"""Runs on Ray for tests: what they tell, what they leave, and their ranks."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fitune.session.events import Event
from fitune.session.training import train_recipe
from fitune.spec.rank_status import RankStatus, read_statuses
from fitune.spec.recipe import Recipe
from fitune.spec.reports import RunReport, StepReport
from fitune.spec.run_directory import LOGS
from fitune.spec.serial import from_data


@dataclass(slots=True)
class Heard:
    """Everything that a run tells; ``at_step`` is called once that step was told."""

    at_step: dict[int, Callable[[], object]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StepReport):
            for step in sorted(self.at_step):
                if event.step >= step:
                    self.at_step.pop(step)()

    @property
    def text(self) -> str:
        return "\n".join(str(event) for event in self.events)


def by_one_process(recipe: Recipe) -> Path:
    """The same run in this process; its directory."""
    train_recipe(recipe, overwrite=False, tell=lambda event: None, stop_asked=lambda: False)
    assert recipe.output_dir
    return Path(recipe.output_dir)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def report_of(folder: Path) -> RunReport:
    return from_data(RunReport, json.loads((folder / "report.json").read_text()))


def rank_of(folder: Path, rank: int) -> RankStatus:
    return read_statuses(folder / LOGS)[rank]


def kill(folder: Path, rank: int) -> None:
    os.kill(rank_of(folder, rank).pid, signal.SIGKILL)
