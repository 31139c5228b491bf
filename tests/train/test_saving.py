"""Ranks save together: the one that fails is named with its bytes, and the checkpoint before stays."""

import errno
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from checkpoint.killed_saves import same, shares_of, state_of
from checkpoint.saves import names
from fitune.checkpoint.commit import Attempt, Descent
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.engine.ranks import Ranks
from fitune.errors import CheckpointError, FituneError, PeerGone, RankFailed
from fitune.train import saving
from fitune.train.peers import Gathered

WORLD = 2


@dataclass
class Group:
    """Threads in place of processes; one that ends with an error is gone for the others."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORLD))
    values: dict[int, Any] = field(default_factory=dict)


@dataclass
class ThreadRanks:
    """As Ranks, of threads."""

    rank: int
    group: Group
    is_alone: bool = False

    @property
    def is_first(self):
        return self.rank == 0

    def gathered(self, value):
        self.group.values[self.rank] = value
        try:
            self.group.barrier.wait(120)
            found = [self.group.values[rank] for rank in range(WORLD)]
        except threading.BrokenBarrierError:
            raise PeerGone("another rank is gone") from None
        with suppress(threading.BrokenBarrierError):  # of a rank that has read them, and failed by them
            self.group.barrier.wait(120)
        return found

    def from_first(self, make):
        own = (None, None)
        if self.is_first:
            try:
                own = (make(), None)
            except FituneError as error:
                own = (None, error)
        value, error = self.gathered(own)[0]
        if error is not None:
            raise error if self.is_first else RankFailed(f"rank 0 stopped: {error.message}")
        return value


def saved_by_all(run, step):
    """How every rank's save of ``step`` ended."""
    group, ended = Group(), dict[int, BaseException | None]()
    shares = shares_of(state_of(step), WORLD)

    def as_rank(rank):
        try:
            saving.save_together(
                cast(Ranks, ThreadRanks(rank, group)), run, shares[rank],
                descent=Descent(line=(Attempt(id="only", after=0),)), keep=2, eval_loss=None, on_note=print,
            spare=())  # fmt: skip
            ended[rank] = None
        except BaseException as error:
            ended[rank] = error
            group.barrier.abort()

    threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [ended[rank] for rank in range(WORLD)]


@pytest.fixture
def run(tmp_path):
    """A run with step-1."""
    assert saved_by_all(tmp_path, 1) == [None, None]
    return tmp_path


def fail_writing(monkeypatch, name, error):
    real = os.open

    def failing(path, *words, **named):
        if Path(path).name == name:
            raise error
        return real(path, *words, **named)

    monkeypatch.setattr(os, "open", failing)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_named_with_its_bytes(run, monkeypatch, rank):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fail_writing(monkeypatch, f"optimizer-rank{rank}.safetensors", full)
    for error in saved_by_all(run, 2):
        assert isinstance(error, CheckpointError)
        assert f"rank {rank} cannot write its share: No space left on device; it needs 1.0 MiB" in str(error)
        assert "The last saved one is step-1." in str(error)
    assert names(run) == ["LINE", "latest", "step-1"]


def test_a_disk_that_fails_at_the_commit_fails_all_ranks(run, monkeypatch):
    fail_writing(monkeypatch, "COMMIT", OSError(errno.EIO, os.strerror(errno.EIO)))
    first, second = saved_by_all(run, 2)
    assert isinstance(first, CheckpointError)
    assert isinstance(second, RankFailed)
    assert "Input/output error" in str(first)
    assert "Input/output error" in str(second)
    assert names(run) == ["LINE", "latest", "step-1"]


def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(run, monkeypatch):
    fail_writing(monkeypatch, "model-rank1.safetensors", SystemExit())
    first, _ = saved_by_all(run, 2)
    assert isinstance(first, PeerGone)
    assert names(run) == ["LINE", "latest", "step-1"]
    monkeypatch.undo()
    assert saved_by_all(run, 3) == [None, None]
    found = newest_checkpoint(run).path
    assert found is not None
    assert same(load_checkpoint(found), state_of(3))


def test_the_ranks_that_follow_an_export_end_when_the_first_one_fails():
    """They wait for word before each tensor, so none is left in a collective."""
    group = Group()
    weights = {name: torch.ones(2) for name in ("a", "b", "c")}
    first, second = (
        Gathered(cast(Ranks, ThreadRanks(rank, group)), weights) for rank in range(WORLD)
    )  # fmt: skip
    ended = []

    def follow():
        try:
            second.follow()
        except FituneError as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()

    def export():
        assert torch.equal(first["a"], weights["a"])
        raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError):
        ThreadRanks(0, group).from_first(export)
    thread.join(240)
    assert [str(error) for error in ended] == ["rank 0 stopped: the disk is full"]


def test_asking_whether_a_gathered_weight_is_there_sends_nothing():
    """The other ranks wait for word of each tensor once, in their order."""
    speechless = cast(Ranks, None)
    gathered = Gathered(speechless, {"a": torch.ones(2)})
    assert "a" in gathered
    assert "b" not in gathered
    assert gathered.keys() == {"a"}
    assert gathered.get("b") is None
