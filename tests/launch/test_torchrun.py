"""Two ranks that are small scripts, started and stopped by the launcher: each runs in a program of its own, which may
end all its children."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fitune.launch.nodes import ONE_NODE
from fitune.launch.torchrun import run_ranks

RANKS = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
folder = Path(os.environ["FOLDER"])
stopped = []
signal.alarm(120)  # where nobody stops it
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
(folder / f".pid{rank}").write_text(str(os.getpid()))
(folder / f".pid{rank}").rename(folder / f"pid{rank}")
while not all((folder / f"pid{each}").exists() for each in range(2)):  # from here on both can be stopped
    time.sleep(0.01)
if os.environ["FAULT"] == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["FAULT"] == "raises" and rank == "1":
    raise ValueError("a fault of the test")
(folder / f"ready{rank}").touch()
while not stopped:
    time.sleep(0.01)
(folder / f"stopped{rank}").touch()
sys.exit(4 if os.environ["FAULT"] else 0)
"""


def launch(folder, fault):
    """What the launcher's program does; its exit code is the job's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
    os.environ |= {"FAULT": fault, "FOLDER": str(folder)}
    ended = run_ranks(
        [sys.executable, "-c", RANKS], processes=2, threads=1, directory=folder / "run", nodes=ONE_NODE, run_id=""
    )  # fmt: skip
    (folder / "cause").write_text(ended.cause)
    sys.exit(ended.exit_code)


def launched(folder, fault):
    """The program, begun: no fork, in which a lock that a thread of torch holds here would never be let go."""
    program = multiprocessing.get_context("spawn").Process(target=launch, args=(folder, fault))
    program.start()
    return program


def end(program):
    program.join(timeout=150)
    program.kill()  # nothing happens where it has ended
    return program.exitcode


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raises", "rank 1 failed: ValueError: a fault of the test"),
        ("killed", "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_named_and_the_other_one_is_stopped(tmp_path, fault, cause):
    assert end(launched(tmp_path, fault)) == 1
    assert cause in (tmp_path / "cause").read_text()
    assert (tmp_path / "stopped0").exists()
    assert not any(lives(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


def test_a_signal_is_passed_on_to_every_rank(tmp_path):
    started = launched(tmp_path, "")
    until = time.monotonic() + 120
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGINT)
    assert end(started) == 130
    assert all((tmp_path / f"stopped{rank}").exists() for rank in range(2))


def lives(pid):
    return Path(f"/proc/{pid}").exists()
