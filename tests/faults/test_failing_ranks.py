"""Rows 3, 36 and 37 of the fault table for a run of two processes: a rank that fails is named with its own error, one
that hangs is found, signals stop all of them, and no process is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from faults import faulty_ranks
from faults.faulty_ranks import until_heard, until_ready
from fitune.errors import RunDirectoryError
from fitune.launch.nodes import ONE_NODE
from fitune.launch.torchrun import Ended
from fitune.session import program as session_program
from fitune.values.run_directory import LAUNCH_LOCK
from fitune.values.run_lock import lock_directory
from runs import report_of, set_words, steps_of

slow, weekly = pytest.mark.slow, pytest.mark.weekly
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture
def program(tmp_path, model_folder, data_file):
    """``fitune train`` on two processes, in which ``rank`` has a ``fault`` in its ``call``-th backward pass."""

    def begin(fault, *words, rank=1, call=4, stall=0.0, together=1.0):
        settings = {
            "model": model_folder, "data": data_file, "tuning": "full", "precision": "fp32", "gpus": 2, "zero": 3,
            "backend": "fsdp", "seq_len": 64, "micro_batch_size": 2, "gradient_accumulation_steps": 1,
            "max_steps": 8, "samples": 0, "save_steps": 1, "output_dir": tmp_path / "run",
        }  # fmt: skip
        own = {"GO": str(tmp_path / "go"), "FITUNE_STALL_SECONDS": str(stall), "TOGETHER": str(together)}
        return subprocess.Popen(
            [sys.executable, faulty_ranks.__file__, str(rank), str(call), fault, "train", *set_words(settings), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **own}, start_new_session=True,
        )  # fmt: skip

    return begin


def end(started):
    """Exit code and standard error, once it is certain that nothing it started still runs."""
    _, err = started.communicate(timeout=300)
    return started.returncode, err


def pids(run):
    return [json.loads(file.read_text())["pid"] for file in (run / "rank-logs").glob("rank*.json")]


def require_all_gone(run, *, within_s=0.0):
    until = time.monotonic() + within_s
    found = pids(run)
    assert found
    while alive := [pid for pid in found if psutil.pid_exists(pid)]:
        assert time.monotonic() < until, alive
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("fault", "rank", "call", "words"),
    [
        pytest.param(
            "raise_value_error", 1, 4, r"rank 1 failed: ValueError \(loss, step 4\): a fault of the test", marks=slow
        ),
        pytest.param("kill", 1, 4, r"rank 1 was killed by SIGKILL.*dmesg", marks=slow),
        pytest.param("raise_data_error", 0, 4, r"row 7 of the test cannot be read", marks=weekly),
        pytest.param("lack_a_module", 1, 0, r"rank 1 failed: ModuleNotFoundError: No module named 'no_", marks=weekly),
    ],
)  # fmt: skip
def test_the_rank_that_failed_is_named_with_its_error(program, tmp_path, fault, rank, call, words):
    ended, err = end(program(fault, rank=rank, call=call))
    assert ended == 1, err
    assert re.match(f"error: {words}", err), err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    run = tmp_path / "run"
    if call:
        report = report_of(run)
        assert (report.status, report.steps) == ("failed", 3)
    if rank and call:
        assert report.failure.error == "PeerGone"
        assert ("ended without a word" if fault == "kill" else "rank 1 failed: ") in report.reason
    require_all_gone(run)
    if fault == "raise_value_error":
        assert fault in (run / "rank-logs/rank1-traceback.txt").read_text()


FAILED_SAVES = (
    (
        "fill_disk_of_save",
        r"error: checkpoint step-2 could not be saved: rank 1 cannot write its share: No space left on device; it "
        r"needs .* The last saved one is step-1",
        1,
    ),
    ("kill_in_save", r"error: rank 0 was killed by SIGKILL", 0),
)


@slow
def test_ranks_that_fail_in_a_save_leave_the_checkpoint_before_to_go_on_from(program, tmp_path):
    """One run that fails in two saves, each time otherwise, and goes on each time."""
    folder = tmp_path / "run/checkpoints"
    for done, (fault, words, rank) in enumerate(FAILED_SAVES, start=1):
        ended, err = end(program(fault, *(["--resume"] if done > 1 else []), rank=rank, call=2))
        assert ended == 1, err
        assert re.search(words, err), err
        assert err.count("error:") == 1
        assert (folder / f"step-{done}/COMMIT").is_file()
        assert not (folder / f"step-{done + 1}").exists()
        require_all_gone(tmp_path / "run")
    ended, err = end(program("kill", "--resume", call=99))
    assert ended == 0, err
    assert sorted(path.name for path in folder.iterdir()) == ["LINE", "latest", "step-7", "step-8"]
    assert [step.step for step in steps_of(tmp_path / "run")] == list(range(1, 9))


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(INT, 130, marks=slow), pytest.param(HUP, 129, marks=weekly)]
)
def test_one_signal_lets_all_ranks_finish_the_step(program, tmp_path, number, code):
    """SIGTERM to the launcher alone: launch/test_several_nodes.py."""
    started, run = program("wait", rank=0), tmp_path / "run"
    until_ready(started)
    with pytest.raises(RunDirectoryError, match="in use by process"), lock_directory(run, lock=LAUNCH_LOCK):
        pass
    os.killpg(started.pid, number)
    until_heard(tmp_path / "go")
    (tmp_path / "go").touch()
    ended, err = end(started)
    assert ended == code, err
    assert "error:" not in err
    assert (report_of(run).status, report_of(run).steps) == ("interrupted", 4)
    assert (run / "checkpoints/step-4/COMMIT").is_file()
    require_all_gone(run)


@pytest.mark.parametrize(("status", "code"), [("interrupted", 143), ("complete", 0)])
def test_a_rank_that_alone_was_asked_to_stop_makes_no_complete_run(
    tmp_path, monkeypatch, make_plan, status, code
):
    """All ranks save and end with 0, which tells their launcher nothing; it once said that the run was complete."""

    def run_ranks(*words, directory, **named):
        (directory / "report.json").write_text(json.dumps({"status": status}))
        return Ended(exit_code=0)

    monkeypatch.setattr(session_program, "run_ranks", run_ranks)
    (tmp_path / "run").mkdir()
    assert session_program._run(make_plan(), ONE_NODE).exit_code == code


@weekly
def test_a_signal_to_every_process_of_the_job_is_one_request(program, tmp_path):
    """Each rank gets it from whoever sends it, and once more from its launcher."""
    started = program("wait", rank=0, together=600.0)
    until_ready(started)
    for signals, told in enumerate((pids(tmp_path / "run"), [started.pid]), start=1):
        for pid in told:
            os.kill(pid, TERM)
        until_heard(tmp_path / "go", signals=signals)
    (tmp_path / "go").touch()
    assert end(started)[0] == 143
    assert (tmp_path / "run/checkpoints/step-4/COMMIT").is_file()


@slow
def test_a_second_signal_stops_all_ranks_at_once(program, tmp_path):
    """The rank that waits would do so for ten minutes."""
    started = program("wait", rank=0, together=0.0)
    until_ready(started)
    started.send_signal(TERM)
    until_heard(tmp_path / "go")
    started.send_signal(INT)
    ended, _ = end(started)
    assert ended == 130
    require_all_gone(tmp_path / "run")


@slow
def test_ranks_of_a_launcher_that_is_killed_save_and_end(program, tmp_path):
    started = program("wait", rank=0)
    until_ready(started)
    started.kill()
    started.wait()
    until_heard(tmp_path / "go")
    (tmp_path / "go").touch()
    require_all_gone(tmp_path / "run", within_s=120)
    assert (tmp_path / "run/checkpoints/step-4/COMMIT").is_file()


@slow
@pytest.mark.parametrize("fault", ["hang", "freeze"])
def test_a_rank_that_hangs_is_found(program, tmp_path, fault):
    ended, err = end(program(fault, stall=5.0))
    assert ended == 1, err
    where = "loss, step 4" if fault == "hang" else "gives no sign of life, last seen in "
    assert f"error: no progress for 5 s: rank 1 is behind ({where}" in err
    assert err.count("error:") == 1
    run = tmp_path / "run"
    assert "no progress for 5 s: rank 1 is behind" in report_of(run).reason
    assert "torch/distributed" in (run / "rank-logs/rank0-stacks.txt").read_text()
    if fault == "hang":
        assert "faulty_ranks.py" in (run / "rank-logs/rank1-stacks.txt").read_text()
    require_all_gone(run)


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_second_program_in_the_same_directory_is_refused_and_leaves_the_logs_of_the_first(
    train, tmp_path, words
):
    log = tmp_path / "run/rank-logs/rank1.log"
    log.parent.mkdir(parents=True)
    log.write_text("of the first")
    with lock_directory(tmp_path / "run", lock=LAUNCH_LOCK):
        train(*words, gpus=2, zero=3).ends(2, f"is in use by process {os.getpid()}")
    assert log.read_text() == "of the first"
