"""MLflow, by its own client; without a server in the store that MLflow has by itself: ``mlflow.db`` in this folder."""

import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import time
from typing import Any

from fitune.credentials import without_credentials
from fitune.track.trackers import Beginning, End, Where, markdown, scalars
from fitune.values.reports import StepReport

_EXPERIMENT = "fitune"
_STATUS = {"complete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 500
"""In one request, as MLflow's REST API says."""


class MLflow:
    """A run of MLflow. Its server makes the ids; every attempt goes on with the one of the first."""

    def start(self, beginning: Beginning) -> Where:
        """Begins the run, or goes on with a known one; returns its address."""
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        self._client: Any = mlflow.MlflowClient(tracking_uri=beginning.tracking.server or None)
        self._uri = beginning.tracking.server or mlflow.get_tracking_uri()
        run = None if beginning.is_new else self._known(beginning.run_id)
        run = run or self._client.create_run(self._experiment(beginning), run_name=beginning.name)
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._settings(beginning.settings, run.data.params)
        self._where = self._place(run.info.experiment_id)
        return self._where

    def steps(self, reports: Sequence[StepReport]) -> None:
        """All scalars of all reports at once; their time is that of sending."""
        now = int(time() * 1000)
        metrics = [
            self._entities.Metric(name, number, now, report.step)
            for report in reports
            for name, number in scalars(report)
        ]
        self._send(metrics)

    def finish(self, end: End) -> Where:
        """Logs final figures, table and files, and ends the run."""
        now = int(time() * 1000)
        self._send([self._entities.Metric(name, number, now, 0) for name, number in end.figures.items()])
        for file in end.files:
            self._client.log_artifact(self._id, file)
        if end.table:
            with tempfile.TemporaryDirectory() as folder:
                table = Path(folder) / "predicted_and_measured.md"
                table.write_text(markdown(end.table), encoding="utf-8")
                self._client.log_artifact(self._id, str(table))
        self._client.set_tag(self._id, "fitune.status", end.status)
        self._client.set_terminated(self._id, _STATUS[end.status])
        return self._where

    def _known(self, run_id: str) -> Any:
        """The run of an earlier attempt; None when this server does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _experiment(self, beginning: Beginning) -> str:
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID", "") if not beginning.tracking.project else "":
            return given
        name = beginning.tracking.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _settings(self, settings: dict[str, Any], known: dict[str, str]) -> None:
        """Parameters never change in MLflow: what another plan of the same run has is a tag."""
        texts = {name: str(value)[:_LONGEST_PARAM] for name, value in settings.items()}
        new = [self._entities.Param(name, text) for name, text in texts.items() if name not in known]
        tags = [
            self._entities.RunTag(f"now.{name}", text)
            for name, text in texts.items()
            if known.get(name, text) != text
        ]
        for part in _parts(new, _MOST_PARAMS):
            self._client.log_batch(self._id, params=part)
        for part in _parts(tags, _MOST_PARAMS):
            self._client.log_batch(self._id, tags=part)

    def _send(self, metrics: list[Any]) -> None:
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def _place(self, experiment: str) -> Where:
        if self._uri.startswith(("http://", "https://")):
            page = f"{self._uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
            return Where(run_id=self._id, link=without_credentials(page))
        store = shlex.quote(without_credentials(self._uri))
        return Where(run_id=self._id, command=f"mlflow ui --backend-store-uri {store}")


def _parts(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
