"""Kill -9 one rank, the launcher or all of a run of two processes, again and again, and let it go on.

Run as a program: ``killed_ranks.py FOLDER MODEL DATA --kills N --seed S``. A full fine-tune in fp32 is divided by
FSDP2 (ZeRO-3) over two processes and saves every step. Each attempt is ``fitune train --resume``, killed a random
time after a random number of its steps. Prints one JSON object of what was seen, which FOLDER/seen.json has after every
attempt, too, and a line an attempt on standard error; a run that does not end with the weights and losses of the
undisturbed one, bit for bit, or leaves a process behind, ends it with an AssertionError.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from fitune.track.metrics import read_metrics
from fitune.values.rank_status import read_statuses

WHO = ("rank 0", "rank 1", "launcher", "all")
TIMEOUT_SECONDS = 300


class Killer:
    """Attempts at one run, and what they must end like."""

    def __init__(self, folder, settings, *, seed):
        self.folder, self.settings = folder, settings
        self.random = random.Random(seed)
        self.run = folder / "run"
        self.starts = 0
        self.seen = Counter()
        self.steps_at_kills = []

    def undisturbed(self):
        started = self._start(self.folder / "straight")
        assert started.wait(TIMEOUT_SECONDS) == 0, self._said()
        self.weights = load_file(self.folder / "straight/model/model.safetensors")
        self.losses = losses(self.folder / "straight")

    def attempt(self):
        """Go on, and be killed after 0 to 3 more steps and up to a third of a second."""
        before, started = len(losses(self.run)), self._start(self.run)
        wanted, until = before + self.random.randrange(4), time.monotonic() + TIMEOUT_SECONDS
        while started.poll() is None and (len(losses(self.run)) < wanted or len(self._pids()) < 2):
            assert time.monotonic() < until, self._said()
            time.sleep(0.01)
        time.sleep(self.random.uniform(0, 0.3))
        pids = self._pids()
        who = self.random.choice(WHO)
        if started.poll() is None:
            self._kill(who, started, pids)
        code = started.wait(TIMEOUT_SECONDS)
        self._require_gone(pids)
        if code == 0:
            self._require_same_end()
            self.seen["ended before it was killed"] += 1
            shutil.rmtree(self.run)
            return
        assert code in (1, -signal.SIGKILL), (code, self._said())
        self.seen[f"killed: {who}"] += 1
        self.steps_at_kills.append(len(losses(self.run)))

    def to_its_end(self):
        assert self._start(self.run).wait(TIMEOUT_SECONDS) == 0, self._said()
        self._require_same_end()

    @property
    def kills(self):
        return sum(count for name, count in self.seen.items() if name.startswith("killed"))

    def tell(self):
        """JSON of what was seen so far, which is written down, too."""
        seen = {"steps": self.settings["max_steps"], "kills": self.kills, **self.seen}
        text = json.dumps({**seen, "steps_done_at_kills": self.steps_at_kills}, indent=1)
        (self.folder / "seen.json").write_text(text)
        print(f"{self.kills} kills, after {self.steps_at_kills} steps", file=sys.stderr)
        return text

    def _start(self, run):
        settings = dict(self.settings)
        if settings["async_save"] == "by turns":
            settings["async_save"] = self.starts % 2 == 1
        self.starts += 1
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with (self.folder / "said").open("w") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "fitune", "train", *words, "--set", f"output_dir={run}", "--resume"],
                stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def _pids(self):
        """Processes of the ranks that have said that they are there."""
        statuses = read_statuses(self.run / "rank-logs").values()
        return {status.rank: status.pid for status in statuses if psutil.pid_exists(status.pid)}

    def _kill(self, who, launcher, pids):
        chosen = {
            "rank 0": [pids.get(0)], "rank 1": [pids.get(1)], "launcher": [launcher.pid],
            "all": [launcher.pid, *pids.values()],
        }[who]  # fmt: skip
        for pid in chosen:
            if pid is not None and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)

    def _require_gone(self, pids):
        """Ranks whose launcher was killed finish their step and save first."""
        until = time.monotonic() + TIMEOUT_SECONDS
        while any(psutil.pid_exists(pid) for pid in pids.values()):
            assert time.monotonic() < until, pids
            time.sleep(0.05)

    def _said(self):
        return (self.folder / "said").read_text(errors="replace")

    def _require_same_end(self):
        found = load_file(self.run / "model/model.safetensors")
        assert found.keys() == self.weights.keys()
        assert all(torch.equal(found[name], weight) for name, weight in self.weights.items())
        assert losses(self.run) == self.losses
        report = json.loads((self.run / "report.json").read_text())
        assert (report["status"], report["reason"]) == ("complete", "")
        self.seen["ended like the undisturbed run"] += 1


def losses(run):
    file = run / "metrics.jsonl"
    return [(step.step, step.loss) for step in read_metrics(file)] if file.is_file() else []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async-save", choices=["false", "true", "by turns"], default="false")
    wanted = parser.parse_args()
    wanted.folder.mkdir(parents=True)
    settings = {
        "model": wanted.model, "data": wanted.data, "tuning": "full", "precision": "fp32", "gpus": 2, "zero": 3,
        "backend": "fsdp", "seq_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3, "max_steps": wanted.steps, "save_steps": 1, "keep_checkpoints": 2, "samples": 0,
        "async_save": wanted.async_save,
    }  # fmt: skip
    killer = Killer(wanted.folder.resolve(), settings, seed=wanted.seed)
    killer.undisturbed()
    while killer.kills < wanted.kills:
        killer.attempt()
        killer.tell()
    killer.to_its_end()
    print(killer.tell())


if __name__ == "__main__":
    main()
