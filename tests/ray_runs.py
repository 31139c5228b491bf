"""Runs on Ray for tests: what they tell, what they leave, and their ranks."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fitune.errors import DataError, ScoringFailed
from fitune.score.asking import ScoringWorker
from fitune.session.clusters.ray_ranks import train_as_rank
from fitune.session.events import Event
from fitune.session.train.training import train_recipe
from fitune.values.rank_status import read_statuses
from fitune.values.reports import RunReport, StepReport
from fitune.values.run_directory import LOGS
from fitune.values.serial import from_data

CORES = 2
"""Workers that have room on the head; a core of Ray is a number and no core."""


def node_args(**resources):
    return {"object_store_memory": 80 * 2**20, "include_dashboard": False, **resources}


@dataclass(slots=True)
class Heard:
    """Everything that a run tells; ``at_step`` is called once that step was told."""

    at_step: dict[int, Callable[[], object]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __call__(self, event):
        self.events.append(event)
        if isinstance(event, StepReport):
            for step in sorted(self.at_step):
                if event.step >= step:
                    self.at_step.pop(step)()

    @property
    def text(self):
        return "\n".join(str(event) for event in self.events)


def by_one_process(recipe):
    """The same run in this process; its directory."""
    train_recipe(recipe, overwrite=False, emit=lambda event: None, stop_asked=lambda: False)
    assert recipe.output_dir
    return Path(recipe.output_dir)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def report_of(folder):
    return from_data(RunReport, json.loads((folder / "report.json").read_text()))


def rank_of(folder, rank):
    return read_statuses(folder / LOGS)[rank]


def wait_for(condition, *, what, seconds=240.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} for {seconds:g} s in vain"
        time.sleep(0.05)


def wait_until_idle(seconds=240.0):
    """Wait until nobody holds a core of the cluster, and no node that is gone is counted."""
    from fitune.launch.ray_cluster import cluster_now

    def is_idle():
        cluster = cluster_now()
        return cluster.free.get("CPU") == sum(node.resources.get("CPU", 0.0) for node in cluster.nodes)

    wait_for(is_idle, what="somebody held cores of the cluster", seconds=seconds)


def count_room():
    """Let Ray see at once which nodes there are for an elastic group; by itself it looks every 20 s, and a run that
    begins before takes fewer workers than have room."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    import ray

    coordinator = get_or_create_autoscaling_coordinator()
    ray.get(coordinator.get_reserved_resources.remote("nobody", recompute=True))


def is_committed(folder, step):
    return (folder / "checkpoints" / f"step-{step}" / "COMMIT").exists()


def spoil_ray(folder):
    """Leave in a run's directory what a crash of Ray leaves: torn snapshots, checkpoints that they do not name, and one
    of ours without COMMIT."""
    for run in (folder / LOGS / "ray").iterdir():
        (run / "checkpoint_manager_snapshot.json").write_text('{"ray_version": "2.60.0", "checkpoint_resu')
        (run / "checkpoint_2026-01-01_00-00-00.000000").mkdir(exist_ok=True)
    orphan = folder / "checkpoints" / "step-5"
    orphan.mkdir(exist_ok=True)
    (orphan / "model.safetensors").write_bytes(bytes(99))


@dataclass(frozen=True, slots=True)
class Faulty:
    """A worker's function with a fault on rank 1, in its ``call``-th loss: ``error``, ``kill``, ``memory``, ``hold``,
    which keeps the rank until it is killed, ``wait``, until somebody makes the file ``marker``, ``notice``, until it
    knows that a node will be taken away, or ``stop``, until it is asked to save and end; ``spoil`` damages what Ray has
    in the run's ``folder``, which heard of no step, and kills the rank. Where a ``folder`` is named, both wait for the
    checkpoint of step ``saved`` there. With any other fault than ``wait`` the file says that it happened, and it
    happens once. The next group of workers then has the fault ``stop`` in its ``stop_at``-th loss.

    ``deaf`` is a file, too: until it is there rank 0 is kept from its next look at rank 1, until Ray ends it, and that
    happens once. ``is_slow`` lets it take seconds to say why it ends, as on a machine with other work.
    """

    fault: str
    call: int
    folder: str = ""
    saved: int = 4
    deaf: str = ""
    is_slow: bool = False
    marker: str = ""
    stop_at: int = 0

    def __call__(self, config):
        from fitune.models.language_model import LanguageModel
        from fitune.session.clusters import ray_ranks
        from fitune.train import run as training

        real, calls, explain = LanguageModel.loss_and_gradient, [0], training.explain_failure
        is_next = bool(self.marker) and os.path.exists(self.marker)

        def slowly(*words, **named):
            if self.is_slow and os.environ.get("RANK") == "0":
                time.sleep(6)
            return explain(*words, **named)

        class Known(ray_ranks.Talker):
            def __init__(self, *words, **named):
                super().__init__(*words, **named)
                talkers.append(self)

        talkers = []
        vars(ray_ranks)["Talker"] = Known
        if self.fault == "spoil":
            vars(ray_ranks)["_ASKING_SECONDS"] = 1e6
        training.explain_failure = slowly

        def failing(*words, **named):
            calls[0] += 1
            if is_next and calls[0] == self.stop_at and os.environ.get("RANK") == "1":
                wait_for(talkers[-1].stop_asked, what="nobody asked the rank to stop")
            if calls[0] == self.call and self.deaf and os.environ.get("RANK") == "0":
                self.be_deaf()
            if calls[0] == self.call and os.environ.get("RANK") == "1":
                self.happen(talkers)
            return real(*words, **named)

        LanguageModel.loss_and_gradient = failing
        return train_as_rank(config)

    def be_deaf(self):
        if not os.path.exists(self.deaf):
            Path(self.deaf).touch()
            time.sleep(120)

    def happen(self, talkers):
        import torch

        if self.fault == "wait":
            wait_for(Path(self.marker).exists, what="nobody let the rank go on")
            return
        if self.marker and os.path.exists(self.marker):
            return
        if self.marker:
            Path(self.marker).touch()
        match self.fault:
            case "error":
                raise DataError("row 7 of the test cannot be read", hint="another row")
            case "kill" | "spoil":
                if self.folder:
                    saved = partial(is_committed, Path(self.folder), self.saved)
                    wait_for(saved, what=f"step {self.saved} was not saved", seconds=60)
                if self.fault == "spoil":
                    spoil_ray(Path(self.folder))
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                raise torch.OutOfMemoryError("device out of memory: 4096 bytes more than its 1048576")
            case "hold":
                time.sleep(240)
                raise DataError("the rank was held for 240 s and not killed", hint="see which node was lost")
            case "notice":
                wait_for(lambda: talkers[-1].left_nodes, what="no node was to be taken away")
            case "stop":
                wait_for(talkers[-1].stop_asked, what="nobody asked the rank to stop")


class Squarer:
    """A worker of a pool that squares numbers. Files in ``folder`` say what happens at a piece: ``die-N`` once,
    ``always-N``, ``refuse-N``, ``hold-N`` until it is gone; and which were done, and known to come ``next-N``."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def hello(self):
        return f"process {os.getpid()} here"

    def done(self):
        return 0

    def work(self, piece, ahead):
        if ahead is not None:
            (self.folder / f"next-{ahead}").touch()
        if (self.folder / f"die-{piece}").exists():
            (self.folder / f"die-{piece}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.folder / f"always-{piece}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.folder / f"refuse-{piece}").exists():
            raise ScoringFailed(f"piece {piece} cannot be done", hint="another piece")
        if (self.folder / f"hold-{piece}").exists():
            (self.folder / f"held-{piece}").touch()
        wait_for(lambda: not (self.folder / f"hold-{piece}").exists(), what=f"piece {piece} was held")
        (self.folder / f"did-{piece}").touch()
        return piece**2


class KilledOnce(ScoringWorker):
    """The first worker that has answered a row is killed: the file FITUNE_TEST_KILLED says that it was."""

    def _count(self):
        super()._count()
        try:
            os.close(os.open(os.environ["FITUNE_TEST_KILLED"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
