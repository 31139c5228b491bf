"""Runs on Ray for tests: what they tell, what they leave, and their ranks."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import DataError
from fitune.session.events import Event
from fitune.session.ray_ranks import RankEnd, train_as_rank
from fitune.session.training import train_recipe
from fitune.spec.rank_status import RankStatus, read_statuses
from fitune.spec.recipe import Recipe
from fitune.spec.reports import RunReport, StepReport
from fitune.spec.run_directory import LOGS
from fitune.spec.serial import from_data

CORES = 4
"""Workers that have room on the head; a core of Ray is a number and no core."""


def node_args(**resources: Any) -> dict[str, Any]:
    return {"object_store_memory": 80 * 2**20, "include_dashboard": False, **resources}


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


@dataclass(frozen=True, slots=True)
class Faulty:
    """A worker's function with a fault on rank 1, in its ``call``-th loss: ``error`` or ``kill``.

    ``is_unnoticed`` keeps rank 0 from its next look at rank 1, until Ray ends it.
    """

    fault: str
    call: int
    is_unnoticed: bool = False

    def __call__(self, config: dict[str, Any]) -> RankEnd:
        from fitune.models.language_model import LanguageModel

        real, calls = LanguageModel.loss_and_gradient, [0]

        def failing(*words: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.call and os.environ.get("RANK") == "1":
                self.happen()
            if calls[0] == self.call and self.is_unnoticed:
                time.sleep(120)
            return real(*words, **named)

        LanguageModel.loss_and_gradient = failing
        return train_as_rank(config)

    def happen(self) -> None:
        if self.fault == "error":
            raise DataError("row 7 of the test cannot be read", hint="another row")
        os.kill(os.getpid(), signal.SIGKILL)
