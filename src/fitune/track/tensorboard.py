"""TensorBoard's event files, by its own writer: no torch, no TensorFlow."""

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitune.track.trackers import Beginning, End, Where, markdown, scalars
from fitune.values.reports import StepReport


class TensorBoard:
    """Scalars of every step in the run's folder ``tensorboard``; texts for what is no curve.

    Not-a-number values are written as they are; TensorBoard marks them in the curve.
    """

    def start(self, beginning: Beginning) -> Where:
        """Opens the event file in the run directory; returns the command that shows it."""
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._session_log: Any = event_pb2.SessionLog
        folder = Path(beginning.directory) / "tensorboard"
        self._writer: Any = EventFileWriter(str(folder), flush_secs=10)  # its own 120 s would hide steps
        self._started = False
        command = f"tensorboard --logdir {shlex.quote(str(folder))}"
        self._where = Where(run_id=beginning.run_id, command=command)
        self._texts({"run": beginning.name, "plan": f"```json\n{beginning.plan}```"})
        return self._where

    def steps(self, reports: Sequence[StepReport]) -> None:
        """Flushed each time. Before the first step TensorBoard is told to purge those that a resumed run repeats."""
        for report in reports:
            if not self._started:  # a resumed run writes some steps again: the older ones are purged
                self._started = True
                start = self._session_log(status=self._session_log.START)
                self._writer.add_event(
                    self._event(wall_time=time.time(), step=report.step, session_log=start)
                )
            event = self._event(wall_time=time.time(), step=report.step)
            for tag, number in scalars(report):
                event.summary.value.add(tag=tag, simple_value=number)
            self._writer.add_event(event)
        self._writer.flush()

    def finish(self, end: End) -> Where:
        """Writes the status, the table and the ledgers of the data as texts."""
        texts: dict[str, str] = {"status": end.status}
        if end.table:
            texts["predicted and measured"] = markdown(end.table)
        for file in map(Path, end.files):
            if file.name == "report.json":
                report = json.loads(file.read_text(encoding="utf-8"))
                ledgers = {name: report[name] for name in ("train_data", "eval_data") if report.get(name)}
                texts["data"] = f"```json\n{json.dumps(ledgers, indent=1)}\n```"
        self._texts(texts)
        self._writer.close()
        return self._where

    def _texts(self, texts: dict[str, str]) -> None:
        event = self._event(wall_time=time.time(), step=0)
        for tag, text in texts.items():
            value = event.summary.value.add(tag=tag)
            value.metadata.plugin_data.plugin_name = "text"
            value.tensor.dtype = 7  # DT_STRING
            value.tensor.tensor_shape.dim.add(size=1)
            value.tensor.string_val.append(text.encode())
        self._writer.add_event(event)
