"""Commands of ranks from a plan, who a process is by its launcher's environment, and how a job of many ended."""

import os
import signal
from dataclasses import replace
from datetime import timedelta

import pytest

from fitune.engine import ranks as joining
from fitune.engine.ranks import ALONE, Ranks, first_host, joined_ranks, launched_ranks, meeting_point
from fitune.errors import HardwareError, PeerGone, RecipeError
from fitune.launch.torchrun import Ended, Exit, ended
from fitune.session.clusters.launching import machine_commands
from fitune.session.clusters.ray_ranks import cause_of_loss, write_losses
from fitune.track.metrics import to_line
from fitune.train.peers import name_the_cause, stall_seconds, stalled_error
from fitune.values.rank_status import RankError, RankStatus, read_statuses, write_status
from fitune.values.run_directory import LOGS, rank_log
from plans import CPU, plan_for, small_llama
from report.conftest import make_steps
from several import kept_port

SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "40123",
    "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-08,11],login",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ALONE),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Ranks(rank=3, world=4, local=1)),
        (SLURM, Ranks(rank=5, world=8, local=1)),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}, Ranks(rank=0, world=2)),
        # A batch script that is no task of srun:
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ALONE),
        (MPI, Ranks(rank=1, world=2, local=1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Ranks(rank=1, world=3)),
    ],
)
def test_a_process_knows_who_it_is(environment, expected):
    assert launched_ranks(environment) == expected


@pytest.mark.parametrize("rank", ["two", "-1", "2"])
def test_a_rank_that_cannot_be_is_refused(rank):
    with pytest.raises(HardwareError, match="RANK"):
        launched_ranks({"RANK": rank, "WORLD_SIZE": "2"})


def test_ranks_meet_on_the_first_machine():
    assert meeting_point(SLURM) == {"MASTER_ADDR": "gpu07", "MASTER_PORT": str(20_000 + 40_125 % 20_000)}
    of_all_ranks = str(20_000 + os.getppid() % 20_000)
    assert meeting_point(MPI) == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": of_all_ranks}
    assert meeting_point({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1"}) == {}
    with pytest.raises(HardwareError, match="MASTER_ADDR"):
        meeting_point({**MPI, "OMPI_COMM_WORLD_SIZE": "4"})


def test_a_rank_that_never_comes_is_missed_after_minutes(monkeypatch):
    """Collectives may wait for hours; a launcher starts all its ranks at once."""
    monkeypatch.setattr(joining, "MEETING", timedelta(milliseconds=200))
    with kept_port() as port:
        rank_0 = {**SLURM, "SLURM_PROCID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in rank_0.items():
            monkeypatch.setenv(name, value)
        words = "rank 0 of 8 did not meet the others .* 1/8 clients"
        with pytest.raises(HardwareError, match=words), joined_ranks():
            pass


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu3", "gpu3"), ("a,b", "a"), ("n[1,5]", "n1"), ("gpu[007-010],x", "gpu007"), ("a-b[2]", "a-b2")],
)
def test_the_first_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_one_command_for_each_machine():
    recipe = ["my recipe.yaml"]
    one = plan_for(small_llama(), hardware=replace(CPU, gpus_per_node=4, cpu_cores=16))
    two = replace(one, hardware=replace(one.hardware, nodes=2))
    torchrun = "OMP_NUM_THREADS=4 torchrun --standalone --nproc-per-node 4 -m fitune train 'my recipe.yaml'"
    assert machine_commands(one, recipe, rendezvous="HOST:PORT") == [torchrun]
    with pytest.raises(RecipeError, match="is not HOST:PORT"):
        machine_commands(two, recipe, rendezvous="h:abc")
    assert machine_commands(two, recipe, rendezvous="a:29400") == [
        f"fitune train 'my recipe.yaml' --node-rank {node} --rendezvous a:29400" for node in (0, 1)
    ]


@pytest.fixture
def logs(tmp_path):
    (tmp_path / LOGS).mkdir()
    return tmp_path / LOGS


@pytest.fixture
def tell(logs):
    """Write the status of a rank, with an error where it has a ``kind``."""

    def write(rank, kind="", at=0.0, pid=1, message="", **what):
        message = message or f"{kind} of {rank}"
        error = RankError(kind=kind, message=message, exit_code=1, at=at) if kind else None
        write_status(logs, RankStatus(rank=rank, pid=pid, error=error, **what))

    return write


@pytest.fixture
def end(tmp_path):
    """How the job ended, from the exit code of each rank and the second at which it was seen."""

    def found(codes, received=(), *, world=3, at=()):
        ends = {rank: Exit(code=code, at=dict(at).get(rank, 0)) for rank, code in codes.items()}
        return ended(ends, tmp_path, received=[*received], ranks=range(world))

    return found


def test_the_first_rank_that_failed_by_itself_is_the_cause(tmp_path, tell, end):
    for rank, kind, at in ((0, "PeerGone", 3), (1, "DataError", 2), (2, "DataError", 1)):
        tell(rank, kind, at)
    found = end({0: 4, 1: 1, 2: 1})
    assert (found.exit_code, found.cause) == (1, "rank 2 failed: DataError of 2")
    assert str(tmp_path / rank_log(2)) in found.hint


@pytest.mark.parametrize("of_first", [1, 143])  # the agent stops rank 0 when it sees that rank 1 ended
def test_an_error_of_all_ranks_is_said_once_and_of_nobody(tell, end, of_first):
    for rank, at in ((0, 2.0), (1, 1.0)):
        tell(rank, "TrainingFailed", at, message="no progress")
    found = end({0: of_first, 1: 1})
    assert (found.exit_code, found.cause, found.is_said) == (1, "no progress", False)


def test_a_rank_that_saw_no_progress_speaks_for_all(tell, end):
    """The agent may stop the others before they have written that they saw it, too."""
    tell(0)
    tell(1, "TrainingFailed", 1.0, message="no progress: rank 1 is behind", stalled=True)
    assert end({0: 143, 1: 1}).cause == "no progress: rank 1 is behind"


def test_a_rank_that_the_agent_stops_while_it_fails_is_the_cause(tell, end):
    tell(0, "CheckpointError", at=1.5)
    tell(1, "RankFailed", at=1.6)
    found = end({1: 4}, world=2, at={1: 2})
    assert (found.cause, found.is_said) == ("CheckpointError of 0", False)


def test_a_rank_that_the_agent_kills_afterwards_is_no_cause(tmp_path, logs, end):
    (tmp_path / rank_log(1)).write_text("Traceback\nImportError: no such thing\n")
    found = end({1: 1, 0: -signal.SIGKILL}, at={1: 100, 0: 130})
    assert (found.cause, found.is_said) == ("rank 1 failed: ImportError: no such thing", False)


SAID = Ended(exit_code=1, cause="rank 0 failed: it said nothing", is_said=True)


@pytest.mark.parametrize(
    ("codes", "received", "expected"),
    [
        ({}, [], Ended(exit_code=0)),
        ({}, [signal.SIGINT], Ended(exit_code=130)),
        ({0: 143, 1: -signal.SIGTERM}, [signal.SIGTERM], Ended(exit_code=143)),
        ({0: 1, 1: 4}, [], SAID),
        ({0: 1, 1: 4}, [signal.SIGTERM], SAID),
        ({0: 4, 1: 4}, [], Ended(exit_code=1)),
    ],
)
def test_the_exit_code_of_a_job(end, codes, received, expected):
    assert end(codes, received, world=2) == expected


@pytest.fixture
def cause(logs):
    """What another rank says of the one that is gone."""

    def named():
        error = PeerGone("another rank is gone")
        name_the_cause(error, logs)
        return error.message

    return named


def test_a_peer_that_is_gone_is_named_with_its_cause(tell, cause):
    tell(1, "DataError", step=3)
    assert cause() == "rank 1 failed: DataError of 1"


def test_a_peer_that_was_killed_is_known_by_its_process(tell, cause):
    tell(1, pid=2**22 + 1, step=3, doing="backward")  # above the largest number of a process
    assert "ended without a word (last seen: backward, step 3)" in cause()
    assert cause().startswith("rank 1 (process 4194305 on ")


def test_a_peer_that_another_process_found_ended_is_known_on_every_machine(tmp_path, logs, tell, cause):
    tell(1, host="elsewhere", doing="starting")
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(to_line, make_steps(5))))
    write_losses(logs, [1])
    last = "(last seen: starting, step 0; metrics.jsonl ends at step 5)"
    assert f"on elsewhere) ended without a word {last}" in cause()
    assert cause_of_loss(read_statuses(logs)) == cause()


def test_a_rank_that_said_why_it_ended_is_not_said_to_be_silent(logs, tell):
    tell(1, "DataError", step=3)
    write_losses(logs, [0, 1])
    assert cause_of_loss(read_statuses(logs)) == "rank 1 failed: DataError of 1"


@pytest.mark.parametrize(
    ("others", "behind"),
    [
        ({1: {"step": 2, "signs": 9, "stalled": True}}, r"rank 1 is behind \(forward, step 2\)"),
        ({1: {"step": 3, "signs": 5, "stalled": True, "is_waiting": False}}, "rank 1 is behind"),
        ({1: {"step": 3, "signs": 5, "stalled": False}}, "rank 1 is behind .gives no sign of life"),
        ({}, "rank 1 is behind .gives no sign of life"),
        ({1: {"step": 3, "signs": 5, "stalled": True, "is_waiting": True}}, "ranks 0, 1 are behind"),
    ],
)
def test_the_rank_that_is_behind_is_named(logs, tell, others, behind):
    tell(0, step=3, signs=5, doing="forward", is_waiting=True, stalled=True)
    for rank, what in others.items():
        tell(rank, doing="forward", **what)
    statuses = read_statuses(logs)
    error = stalled_error(statuses, statuses[0], world=2, limit=60)
    assert error.exit_code == 1
    with pytest.raises(type(error), match=behind):
        raise error


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_limit_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("FITUNE_STALL_SECONDS", text)
    with pytest.raises(RecipeError, match="FITUNE_STALL_SECONDS"):
        stall_seconds()
