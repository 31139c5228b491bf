"""Trackers that need no library: what a good one and a bad one do in their own process."""

import json
import os
import signal
import time
from pathlib import Path

from fitune.track.trackers import Where, scalars


class Toy:
    """Writes down what it is told, and copies the files."""

    def start(self, beginning):
        self.log = Path(beginning.directory) / "toy.jsonl"
        self.where = Where(run_id=beginning.run_id, link=f"https://toy.example/{beginning.run_id}")
        self.write(
            begun=beginning.run_id, new=beginning.is_new, name=beginning.name, settings=beginning.settings,
            pid=os.getpid(),
        )  # fmt: skip
        print("words of a library")
        return self.where

    def steps(self, reports):
        for report in reports:
            self.write(step=report.step, loss=dict(scalars(report))["train/loss"])

    def finish(self, end):
        texts = {Path(file).name: Path(file).read_text() for file in end.files}
        self.write(ended=end.status, figures=end.figures, files=texts)
        return self.where

    def write(self, **told):
        with self.log.open("a") as file:
            file.write(json.dumps(told) + "\n")


class FailsOnce(Toy):
    """Loses its connection at step 3 of its first process."""

    def steps(self, reports):
        for report in reports:
            failed = self.log.with_name("failed")
            if report.step == 3 and not failed.exists():
                failed.touch()
                raise ConnectionError("the server is gone https://me:hunter2@host/")
            super().steps([report])


class Refuses(Toy):
    def start(self, beginning):
        super().start(beginning)
        raise PermissionError("no such project")


class Dies(Toy):
    def steps(self, reports):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Toy):
    def steps(self, reports):
        time.sleep(3600)


class HangsAtTheEnd(Toy):
    def finish(self, end):
        time.sleep(3600)
        return self.where
