"""The frozen base is hashed once on each machine, whatever number of processes trains there."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fitune.engine.ranks import Ranks
from fitune.spec.plan import Plan
from fitune.train import resume
from fitune.train.resume import base_identity


def test_one_rank_of_a_machine_reads_the_base(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, hosts, read = make_plan(tuning="lora"), ("one", "two", "one", "two"), []
    monkeypatch.setattr(resume, "weights_identity", lambda path: read.append(Path(path)) or f"of {rank}")
    told: list[object] = []
    monkeypatch.setattr(Ranks, "gathered", lambda self, value: told.append(value) or everyone or [value])
    everyone: list[tuple[str, str]] = []
    for rank, host in enumerate(hosts):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        base_identity(plan, Ranks(rank=rank, world=4, local=rank // 2))
    assert told[:2] == [("one", "of 0"), ("two", "of 1")]
    everyone, read[:] = [("one", "of 0"), ("two", "of 1"), ("one", ""), ("two", "")], []
    for rank, host in enumerate(hosts):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert base_identity(plan, Ranks(rank=rank, world=4, local=rank // 2)) == f"of {rank % 2}"
    assert len(read) == 2
    assert base_identity(make_plan(tuning="full"), Ranks(rank=0, world=4)) == ""
