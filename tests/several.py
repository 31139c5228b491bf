"""Real processes on gloo for tests: each plan is trained by two of them or more, as torchrun would start them.

Starting a process takes seconds, so one group trains all the plans that it is given, one after the other, and its ranks
are forks of one process that has imported what they need.
"""

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from fitune.values.plan import Plan, Precision
from fitune.values.serial import from_json, to_json

TIMEOUT_SECONDS = 900
"""For all the plans of a group, on a machine that has other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of ``plan``; when it asks for the ``stop_after``-th time, its last rank alone is asked to stop."""

    plan: Plan
    resume: bool | str = False
    overwrite: bool = False
    stop_after: int = 0


def train_on(world, jobs, folder, *, python=()):
    """For every rank, what it says of every job: the report's ``status`` and ``final_loss``, or its ``error``.

    With a ``python`` of their own, ranks are no forks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(jobs):
        words = {"resume": job.resume, "overwrite": job.overwrite, "stop_after": job.stop_after}
        (folder / f"job{number}.json").write_text(json.dumps({"plan": to_json(job.plan), **words}))
    words = [__file__, str(folder), str(len(jobs))]
    if python:
        ended = start(world, [*python, *words])
        said = [process.stdout for process in ended]
    else:
        with kept_port() as port:
            ended = [subprocess.run(
                [sys.executable, *words, "--fork"], env=surroundings(world, port), stderr=subprocess.PIPE, text=True,
                timeout=TIMEOUT_SECONDS,
            )]  # fmt: skip
        said = [(folder / f"said-by-{rank}").read_text() for rank in range(world)]
    for process in ended:
        assert process.returncode == 0, process.stderr[-3000:]
    return [
        [json.loads(line) for line in each.splitlines() if line.startswith("{")]  # a library may print, too
        for each in said
    ]


@contextmanager
def kept_port():
    """A port that the system gives to nobody else inside: it is bound and not listened at, so that a server which
    names it, and shares addresses as those of torch do, can still take it."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def surroundings(world, port):
    return {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def start(world, command):
    """Run ``command`` as every rank of a group and wait for all."""
    with kept_port() as port:
        common = surroundings(world, port)
        started = [
            subprocess.Popen(
                command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(world)
        ]  # fmt: skip
        said = [process.communicate(timeout=TIMEOUT_SECONDS) for process in started]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(started, said, strict=True)
    ]


def allow_fp16_of_deepspeed():
    """DeepSpeed trains in fp16 on processors alone for which oneDNN has such products; torch has its own for all."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    accelerator = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
    accelerator.is_fp16_supported = lambda self: True


def as_rank(folder, jobs):
    """What one rank does: train every job and say how it ended, a line of JSON each."""
    import torch

    from fitune.engine.ranks import joined_ranks
    from fitune.errors import FituneError
    from fitune.train.current import Callbacks
    from fitune.train.run import run

    torch.set_num_threads(1)
    with joined_ranks() as ranks:
        for number in range(jobs):
            job = json.loads((folder / f"job{number}.json").read_text())
            asked = [0]

            def stop_asked(asked=asked, after=job["stop_after"]):
                asked[0] += 1
                return 0 < after <= asked[0] and ranks.rank == ranks.world - 1

            callbacks = Callbacks(
                on_data=lambda data, loader, done: None,
                on_note=lambda note: print(note, file=sys.stderr),
                stop_asked=stop_asked,
                answer=lambda model, conversations: ["" for _ in conversations],
            )
            plan = from_json(Plan, job["plan"])
            if plan.precision is Precision.FP16 and getattr(plan.sharding, "backend", "") == "deepspeed":
                allow_fp16_of_deepspeed()
            try:
                report = run(
                    plan, callbacks=callbacks, resume=job["resume"],
                    overwrite=job["overwrite"], ranks=ranks,
                )  # fmt: skip
                said = {"status": report.status, "final_loss": report.final_loss}
            except FituneError as error:
                said = {"error": error.message}
            print(json.dumps(said), flush=True)


def fork_ranks(folder, jobs):
    """All ranks of the group, each of which says its lines in a file of ``folder``."""
    for name in ("fitune.train.run", "fitune.demo.files"):
        importlib.import_module(name)
    assert (
        "deepspeed" not in sys.modules
    )  # it looks for devices when it is imported, and has to be told first
    if any("deepspeed" in (folder / f"job{number}.json").read_text() for number in range(jobs)):
        importlib.import_module("fitune.engine.deepspeed").import_deepspeed()
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_forked, args=(r, folder, jobs)) for r in range(int(os.environ["WORLD_SIZE"]))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def _forked(rank, folder, jobs):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (folder / f"said-by-{rank}").open("w") as said, redirect_stdout(said):
        as_rank(folder, jobs)


if __name__ == "__main__":
    train = fork_ranks if sys.argv[3:] == ["--fork"] else as_rank
    train(Path(sys.argv[1]), int(sys.argv[2]))
