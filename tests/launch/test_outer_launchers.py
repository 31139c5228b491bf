"""``fitune train`` on two processes that torchrun, mpirun or srun started."""

import json
import os
import socket
import subprocess
import sys

import pytest

from fitune.track.record import read_tracked
from runs import report_of, set_words
from several import kept_port

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tmp_path, model_folder, data_file):
    settings = {
        "model": model_folder, "data": data_file, "tuning": "lora", "precision": "fp32", "zero": 3,
        "backend": "fsdp", "seq_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 2,
        "samples": 0, "output_dir": tmp_path / "run", "report_to": "tensorboard",
    }  # fmt: skip
    return ["-m", "fitune", "train", *set_words(settings)]


def test_torchrun_starts_a_run(words, tmp_path):
    outer = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*outer, *words], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    report = report_of(tmp_path / "run")
    assert (report.status, [row.rank for row in report.ranks]) == ("complete", [0, 1])
    assert ended.stdout.count("report: ") == 1
    (tracked,) = read_tracked(tmp_path / "run")
    assert (tracked.sent, tracked.lost) == (2, 0)  # by the first rank alone
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1


def started(environments, words):
    """Exit code and standard error of a process for each environment."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for environment in environments
    ]  # fmt: skip
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


def mpi(rank, **more):
    names = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
    return {**{f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}, **more}


def test_the_variables_of_mpirun_start_a_run(words, tmp_path):
    with kept_port() as port:
        environments = [mpi(rank, MASTER_PORT=str(port)) for rank in range(2)]
        assert [code for code, _ in started(environments, words)] == [0, 0]
    assert report_of(tmp_path / "run").status == "complete"


ELSEWHERE = "import os, socket; socket.gethostname = lambda: os.environ['MACHINE']; from fitune.cli import main; main()"


def test_processes_on_two_machines_are_planned_as_two_nodes(words, tmp_path):
    with kept_port() as port:
        alone = {
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        environments = [
            mpi(rank, MASTER_PORT=str(port), MACHINE=f"node-{rank}", **alone) for rank in range(2)
        ]
        ended = started(environments, ["-c", ELSEWHERE, *words[2:]])
    assert [code for code, _ in ended] == [0, 0], ended
    hardware = json.loads((tmp_path / "run" / "plan.json").read_text())["hardware"]
    assert (hardware["nodes"], hardware["gpus_per_node"]) == (2, 1)


def test_another_number_of_processes_than_asked_for_is_refused(words):
    with kept_port() as port:
        ended = started([mpi(rank, MASTER_PORT=str(port)) for rank in range(2)], [*words, "--gpus", "4"])
    assert [code for code, _ in ended] == [2, 2]  # 4 is of a rank that another one failed
    assert "error: the plan is for 4 ranks, and 2 were started\n  try: gpus: 2, or start 4" in ended[0][1]


def test_a_port_that_is_taken_is_named(words):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        [(code, said)] = started([mpi(0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)], words)
    assert code == 2
    assert f"error: the port of 127.0.0.1:{port} is taken" in said
    assert "Traceback" not in said
