"""Weights & Biases, by its own client."""

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitune.track.trackers import Beginning, End, Where, scalars
from fitune.values.reports import StepReport

_PROJECT = "fitune"
_TELLS_OF_THE_MACHINE = {
    "console": "off", "disable_git": True, "disable_code": True, "save_code": False, "x_disable_meta": True,
    "x_disable_machine_info": True, "x_save_requirements": False, "host": "",
}  # fmt: skip
"""Off: the command line, the host's and the user's name, the git remote and the list of packages, any of which may
have a token in it."""


class Wandb:
    """A run of wandb, under the same id in every attempt. Without an API key it is kept in the run's folder ``wandb``.

    Steps are named by a curve of their own: wandb's counter only rises, and a resumed run does some steps again.
    """

    def start(self, beginning: Beginning) -> Where:
        """Begins or goes on with the run, offline without a key; returns its address."""
        import wandb

        self._wandb: Any = wandb
        offline, note = beginning.tracking.offline, ""
        try:
            self._run = self._init(beginning, mode="offline" if offline else None)
        except wandb.errors.UsageError as error:  # no key; nobody is there to be asked for one
            if offline:
                raise
            self._run = self._init(beginning, mode="offline")
            note = f"offline: {str(error).partition(chr(10))[0]}"
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._where = self._place(note)
        return self._where

    def steps(self, reports: Sequence[StepReport]) -> None:
        """One row for each step."""
        for report in reports:
            self._run.log({"step": report.step, **dict(scalars(report))})

    def finish(self, end: End) -> Where:
        """Logs final figures, table and files, and ends the run."""
        self._run.summary.update({"status": end.status, **end.figures})
        if end.table:
            head, *rows = end.table
            table = self._wandb.Table(columns=["what", *head[1:]], data=[list(row) for row in rows])
            self._run.log({"predicted and measured": table})
        for file in map(Path, end.files):
            if file.name == "report.html":
                self._run.log({"report": self._wandb.Html(str(file), inject=False)})
            copy = Path(self._run.dir) / file.name
            shutil.copyfile(file, copy)
            self._run.save(str(copy), base_path=self._run.dir, policy="now")
        self._run.finish(exit_code=0 if end.status == "complete" else 1)
        return self._where

    def _init(self, beginning: Beginning, *, mode: str | None) -> Any:
        wanted = beginning.tracking
        chosen_id = "" if wanted.run_id or not beginning.is_new else os.environ.get("WANDB_RUN_ID", "")
        return self._wandb.init(
            project=wanted.project or (None if "WANDB_PROJECT" in os.environ else _PROJECT),
            entity=wanted.team or None,
            name=wanted.run_name or (None if "WANDB_NAME" in os.environ else beginning.name),
            id=chosen_id or beginning.run_id,
            resume="allow",
            mode=mode,
            dir=None if "WANDB_DIR" in os.environ else beginning.directory,
            config=beginning.settings,
            allow_val_change=True,
            settings=self._wandb.Settings(**_TELLS_OF_THE_MACHINE),
        )

    def _place(self, note: str) -> Where:
        if self._run.offline:
            folder = Path(self._run.settings.sync_dir).parent
            command = f"wandb sync {shlex.quote(str(folder))}/offline-run-*-{self._run.id}"
            return Where(run_id=self._run.id, command=command, note=note or "offline")
        if self._run.disabled:
            return Where(run_id=self._run.id, note="WANDB_MODE is disabled")
        return Where(run_id=self._run.id, link=self._run.url or "")
