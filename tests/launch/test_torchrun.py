"""Two ranks that are small scripts, started and stopped by the launcher: each runs in a program of its own, which may
end all its children."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = """
import signal, sys
from pathlib import Path
from fitune.launch.nodes import ONE_NODE
from fitune.launch.torchrun import run_ranks

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore it
words = [sys.executable, "-c", sys.argv[2]]
ended = run_ranks(words, processes=2, threads=1, directory=Path(sys.argv[1]), nodes=ONE_NODE, run_id="")
print(ended.cause)
sys.exit(ended.exit_code)
"""
RANKS = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
folder = Path(os.environ["FOLDER"])
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
(folder / f".pid{rank}").write_text(str(os.getpid()))
(folder / f".pid{rank}").rename(folder / f"pid{rank}")
while not all((folder / f"pid{each}").exists() for each in range(2)):  # from here on both can be stopped
    time.sleep(0.01)
if os.environ["FAULT"] == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["FAULT"] == "raises" and rank == "1":
    raise ValueError("a fault of the test")
if rank == "0":
    print("READY", flush=True)
while not stopped:
    time.sleep(0.01)
(folder / f"stopped{rank}").touch()
sys.exit(4 if os.environ["FAULT"] else 0)
"""


def launched(folder, fault):
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(folder / "run"), RANKS], text=True, stdout=subprocess.PIPE,
        env={**os.environ, "FAULT": fault, "FOLDER": str(folder)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raises", "rank 1 failed: ValueError: a fault of the test"),
        pytest.param("killed", "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path, fault, cause):
    started = launched(tmp_path, fault)
    said, _ = started.communicate(timeout=300)
    assert started.returncode == 1
    assert cause in said
    assert (tmp_path / "stopped0").exists()
    assert not any(lives(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


def test_a_signal_is_passed_on_to_every_rank(tmp_path):
    started = launched(tmp_path, "")
    assert started.stdout is not None
    assert started.stdout.readline() == "READY\n"
    started.send_signal(signal.SIGINT)
    started.communicate(timeout=300)
    assert started.returncode == 130
    assert (tmp_path / "stopped0").exists()


def lives(pid):
    return Path(f"/proc/{pid}").exists()
