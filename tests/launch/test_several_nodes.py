"""A run on two nodes, each with its own network: the model of one process; what is wrong is said on both."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults import faulty_ranks
from faults.faulty_ranks import until_heard, until_ready
from fitune.values.rank_status import read_statuses
from launch.namespaces import two_machines
from runs import assert_close, report_of, set_words

pytestmark = pytest.mark.slow

PORT = 29_417


@pytest.fixture(scope="module")
def cable():
    with two_machines() as cable:
        yield cable


@pytest.fixture
def settings(tmp_path, model_folder, data_file):
    return {
        "model": model_folder, "data": data_file, "tuning": "full", "precision": "fp32", "seq_len": 64,
        "max_steps": 4, "samples": 0, "save_steps": 2, "learning_rate": 1e-3,
        "output_dir": tmp_path / "run",
    }  # fmt: skip


@pytest.fixture
def start(cable, settings, tmp_path):
    """``fitune train`` on one of the nodes; ``fault`` happens in the third backward pass of ``rank``."""
    divided = {
        **settings, "nodes": 2, "zero": 3, "backend": "fsdp", "micro_batch_size": 2, "gradient_accumulation_steps": 1,
    }  # fmt: skip

    def begin(node, fault="wait", rank=9, before=(), **changed):
        meet = ["--node-rank", str(node), "--rendezvous", f"{cable.addresses[0]}:{PORT}"]
        program = [sys.executable, faulty_ranks.__file__, str(rank), "3", fault, "train"]
        program += [*set_words(divided | changed), *meet]
        own = {"FITUNE_CACHE": str(tmp_path / f"cache of {node}"), "GO": str(tmp_path / "go")}
        return subprocess.Popen(
            [*cable.on(node), *before, *program], env={**os.environ, **own}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return begin


def ends(*started):
    """Exit code and standard error of each."""
    said = [each.communicate(timeout=600) for each in started]
    return [(each.returncode, err) for each, (_, err) in zip(started, said, strict=True)]


def failed(code, *started):
    """Standard error of nodes that all ended with this exit code."""
    ended = ends(*started)
    assert {each for each, _ in ended} == {code}, ended
    return [said for _, said in ended]


def test_two_nodes_train_the_model_of_one_process(start, settings, tmp_path):
    second, first = start(1), start(0)
    assert [code for code, _ in ends(first, second)] == [0, 0]
    alone = tmp_path / "alone"
    one = {"micro_batch_size": 4, "gradient_accumulation_steps": 1, "output_dir": alone}
    train = [sys.executable, "-m", "fitune", "train", *set_words(settings | one)]
    subprocess.run(train, check=True, capture_output=True)
    assert_close(tmp_path / "run", alone)
    report = report_of(tmp_path / "run")
    assert (report.status, [row.rank for row in report.ranks]) == ("complete", [0, 1])
    assert (tmp_path / "run/rank-logs/rank1.log").is_file()


def test_a_rank_that_is_killed_is_named_on_both_nodes(start):
    first, second = failed(1, start(0, "kill", rank=1), start(1, "kill", rank=1))
    assert "rank 1 was killed by SIGKILL" in second
    assert "error: node 1 (" in first
    assert "): rank 1 was killed by SIGKILL" in first


def test_an_error_of_rank_0_is_named_on_both_nodes(start):
    first, second = failed(1, *(start(node, "raise_value_error", rank=0) for node in range(2)))
    assert first.count("error:") == 1
    assert "a fault of the test" in first
    assert "error: node 0 (" in second
    assert "): ValueError (loss, step 3): a fault of the test" in second


def test_a_folder_that_is_not_shared_is_refused_on_both(start, tmp_path):
    (tmp_path / "run").mkdir()
    own_disk = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{tmp_path}/run" && exec "$@"', "sh")
    for said in failed(2, start(0), start(1, before=own_disk)):
        assert f"does not see output_dir {tmp_path}/run of rank 0" in said
        assert "a disk that all machines share" in said


def test_other_settings_are_named_before_anything_runs(start):
    for said in failed(2, start(0), start(1, weight_decay=0.1)):
        assert "weight_decay in the recipe differs: none on node 0" in said


def test_a_signal_to_one_node_lets_both_save(start, tmp_path):
    first, second = start(0, rank=0), start(1, rank=0)
    until_ready(first)
    second.send_signal(signal.SIGTERM)
    until_heard(tmp_path / "go", ranks=(1,))
    (tmp_path / "go").touch()
    assert [code for code, _ in ends(first, second)] == [143, 143]
    assert (tmp_path / "run/checkpoints/step-3/COMMIT").is_file()


def test_a_cable_that_is_pulled_ends_both(start, cable, tmp_path, monkeypatch):
    """Nothing closes the connections, so it is found by silence: a minute of it, here ten seconds."""
    monkeypatch.setenv("SILENCE", "10")
    first, second = start(0, rank=0), start(1, rank=0)
    until_ready(first)
    cable.pull()
    (tmp_path / "go").touch()
    silent, lost = failed(1, first, second)
    assert "has given no sign of life for 10 s" in silent
    assert "no longer answers at" in lost
    pids = [status.pid for status in read_statuses(tmp_path / "run/rank-logs").values()]
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
