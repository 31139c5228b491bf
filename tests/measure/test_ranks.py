"""Two real processes measure what they can send one another."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from fitune.engine.joining import joined_ranks
from fitune.measure.calibrate import collective_rates

MEASURE = """
import torch
from fitune.engine.joining import joined_ranks
from fitune.measure import calibrate as measured
measured._SUMMED_BYTES["gloo"] = 2**20
with joined_ranks() as ranks:
    found = measured.collective_rates(torch.device("cpu"))
    print(ranks.rank, found.ranks, found.start_seconds, found.bandwidth)
"""


def test_two_ranks_agree_on_what_they_measured() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lines = [process.communicate(timeout=60)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [line[:2] for line in lines] == [["0", "2"], ["1", "2"]]
    assert lines[0][2:] == lines[1][2:]
    assert 1e-6 < float(lines[0][2]) < 1.0
    assert 1e6 < float(lines[0][3]) < 1e12


def test_a_process_alone_has_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_ranks() as ranks:
        assert ranks.is_first
        assert collective_rates(torch.device("cpu")) is None
