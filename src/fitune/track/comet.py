"""Comet, by its own client."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitune.track.trackers import Beginning, End, Where, scalars
from fitune.values.reports import StepReport

_PROJECT = "fitune"
_TELLS_OF_THE_MACHINE = (
    "log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details", "log_env_gpu",
    "log_env_host", "log_env_cpu", "log_env_network", "log_env_disk", "auto_output_logging", "auto_param_logging",
    "auto_metric_logging", "auto_log_co2",
)  # fmt: skip
"""Off: code, command line, host, network and git, any of which may have a token in it."""


class Comet:
    """An experiment of Comet, under the same key in every attempt. Without an API key it is an archive in the run's
    folder ``comet``, one for each attempt."""

    def start(self, beginning: Beginning) -> Where:
        """Begins or goes on with the experiment, offline without a key; returns its address."""
        import comet_ml

        wanted = beginning.tracking
        has_key = bool(comet_ml.get_config("comet.api_key"))
        self._offline = wanted.offline or not has_key
        self._note = "" if not self._offline else "offline" if has_key or wanted.offline else _NO_KEY
        given = os.environ.get("COMET_OFFLINE_DIRECTORY", "")
        self._folder = Path(given or Path(beginning.directory) / "comet").absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        offline_mode = "create" if beginning.is_new else "get"
        self._experiment: Any = comet_ml.start(
            online=not self._offline,
            mode=offline_mode if self._offline else "get_or_create",
            experiment_key=beginning.run_id,
            project_name=wanted.project or (None if comet_ml.get_config("comet.project_name") else _PROJECT),
            workspace=wanted.team or None,
            experiment_config=comet_ml.ExperimentConfig(
                name=beginning.name,
                display_summary_level=0,
                offline_directory=str(self._folder),
                **dict.fromkeys(_TELLS_OF_THE_MACHINE, False),
            ),
        )
        self._experiment.log_parameters(beginning.settings)
        return self._where()

    def steps(self, reports: Sequence[StepReport]) -> None:
        """One call for each step, with all its scalars."""
        for report in reports:
            self._experiment.log_metrics(dict(scalars(report)), step=report.step)

    def finish(self, end: End) -> Where:
        """Logs final figures, table and files, and ends the experiment."""
        self._experiment.log_others({"status": end.status, **end.figures})
        if end.table:
            head, *rows = end.table
            self._experiment.log_table(
                "predicted_and_measured.csv",
                tabular_data=[list(row) for row in rows],
                headers=["what", *head[1:]],
            )
        for file in map(Path, end.files):
            self._experiment.log_asset(str(file), file_name=file.name, overwrite=True)
            if file.name == "report.html":
                self._experiment.log_html(file.read_text(encoding="utf-8"))
        self._experiment.end()
        return self._where()

    def _where(self) -> Where:
        key = str(self._experiment.get_key())
        if not self._offline:
            return Where(run_id=key, link=self._experiment.url or "")
        command = f"comet upload {shlex.quote(str(self._folder))}/{key}*.zip"
        return Where(run_id=key, command=command, note=self._note)


_NO_KEY = "offline: COMET_API_KEY is not set"
