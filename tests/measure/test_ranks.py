"""Two real processes measure what they can send one another."""

import math
import subprocess
import sys

import pytest
import torch

from fitune.engine.ranks import joined_ranks
from fitune.measure.calibrate import collective_rates
from several import kept_port, surroundings

MEASURE = """
import os, sys, torch
from fitune.engine.ranks import joined_ranks
from fitune.measure import calibrate as measured
measured._SUMMED_BYTES["cpu"] = 2**20
child = os.fork()  # the ranks share what is imported
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(child == 0))
torch.distributed.init_process_group("cpu:gloo")  # by its device, as ranks with GPUs name it
with joined_ranks() as ranks:
    found = measured.collective_rates(torch.device("cpu"))
    measured._all_reduce_seconds = lambda device, elements: 2e-3 if elements == 1 else 1e-3
    held_up = measured.collective_rates(torch.device("cpu"))
    told = (ranks.rank, found.ranks, found.start_seconds, found.bandwidth, held_up.bandwidth)
    os.write(1, " ".join(map(str, told)).encode() + b"\\n")  # in one piece: both write into one pipe
    torch.distributed.barrier()
torch.distributed.destroy_process_group()  # a group that is left at exit may abort
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_ranks_agree_on_what_they_measured():
    with kept_port() as port:
        ended = subprocess.run(
            [sys.executable, "-c", MEASURE], env=surroundings(2, port), capture_output=True, text=True
        )
    assert ended.returncode == 0, ended.stderr
    lines = sorted(line.split() for line in ended.stdout.splitlines())
    assert [line[:2] for line in lines] == [["0", "2"], ["1", "2"]]
    assert lines[0][2:] == lines[1][2:]
    start_seconds, bandwidth, held_up = map(float, lines[0][2:])
    assert 0 < start_seconds < math.inf  # how fast depends on the machine's other work
    assert 0 < bandwidth < math.inf
    assert held_up == pytest.approx(
        2**20 / 1e-4
    )  # where one number takes longer than the buffer, a tenth of its time


def test_a_process_alone_has_nothing_to_measure(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_ranks() as ranks:
        assert ranks.is_first
        assert collective_rates(torch.device("cpu")) is None
