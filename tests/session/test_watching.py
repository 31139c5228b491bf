"""`fitune report RUN --watch`: a page while the run goes on, and the truth about a run that is gone."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from fitune.errors import RunDirectoryError
from fitune.report.run_page import page_of
from fitune.report.run_words import UnderWay, restart_summary, state_line
from fitune.session.reported import report_run, watched_run
from fitune.session.results import text_of
from fitune.session.watching import RunView, watch_run
from fitune.values.rank_status import RankError, RankStatus, write_status
from fitune.values.reports import STOPPED_IN_EXPORT, Restart, RunReport
from fitune.values.run_directory import LOGS
from fitune.values.run_lock import Owner, lock_directory, owners_of
from fitune.values.serial import from_json, to_json
from report.conftest import write_run

_HOLD = """
import sys
from pathlib import Path
from fitune.values.run_lock import lock_directory

with lock_directory(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that has no report yet: 120 steps of it are done."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pictures cost a second
    directory = write_run(tmp_path / "run")
    (directory / "report.json").rename(tmp_path / "report.json")
    return directory


@pytest.fixture
def trainer(run):
    """Another process that owns the run directory until it is told to end, or is killed."""
    words = [sys.executable, "-c", _HOLD, str(run)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def _page(run):
    return (run / "report.html").read_text()


def test_the_watch_ends_with_the_run(run, trainer):
    told = []

    def tell(line):  # after the first page
        told.append(line)
        assert 'http-equiv="refresh" content="1"' in _page(run)
        (run.parent / "report.json").rename(run / "report.json")
        trainer.communicate()

    reported = watched_run(run, log=tell, every_s=0.1)
    assert "running since " in told[0]
    assert "step 120 of 120" in told[0]
    assert reported.run.status == "complete"
    assert "refresh" not in _page(run)


def test_a_killed_run_is_said_to_be_gone(run, trainer):
    assert "running since" in text_of(report_run(run))
    assert watch_run(run, log=lambda line: trainer.kill(), every_s=0.1, sure_s=0.3)
    gone = f"process {trainer.pid} on {os.uname().nodename} is gone"
    assert f"{gone}: step 120 of 120" in text_of(report_run(run))
    assert gone in _page(run)


def test_a_run_that_exports_goes_on_until_its_process_is_gone(run, trainer):
    report = from_json(RunReport, (run.parent / "report.json").read_text())
    (run / "report.json").write_text(to_json(replace(report, status="failed", reason=STOPPED_IN_EXPORT)))
    assert "running since" in report_run(run).text()
    trainer.communicate()
    assert f"the run is failed: {STOPPED_IN_EXPORT}" in report_run(run).text()


def test_a_signal_ends_the_watch_quietly(run, trainer, capfd):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    with pytest.raises(SystemExit) as exit_info:
        watched_run(run, log=lambda line: os.kill(os.getpid(), signal.SIGINT), every_s=60.0)
    assert exit_info.value.code == 0
    assert capfd.readouterr() == ("", "")
    assert "refresh" not in _page(run)
    assert trainer.poll() is None


def test_a_run_that_still_reads_its_data_is_waited_for(run, trainer, monkeypatch):
    (run / "plan.json").rename(run.parent / "plan.json")
    looks = []

    def is_alive(view):
        looks.append(1)
        if len(looks) == 5:
            (run.parent / "plan.json").rename(run / "plan.json")
        return bool(owners_of(view.directory))

    monkeypatch.setattr(RunView, "is_alive", property(is_alive))
    assert not watch_run(run, log=lambda line: os.kill(os.getpid(), signal.SIGTERM), every_s=0.05)
    assert len(looks) >= 5


def test_a_run_that_is_yet_to_begin_is_waited_for(run, tmp_path):
    begun, said = tmp_path / "begun", []
    (tmp_path / "report.json").rename(run / "report.json")

    def tell(line):
        said.append(line)
        run.rename(begun)

    assert watch_run(begun, log=tell, every_s=0.05)
    assert said == [f"waiting for a run to begin in {begun}; Ctrl-C ends this"]
    assert (begun / "report.html").is_file()


@pytest.mark.parametrize("place", ["", "never"], ids=["a lock that nobody holds", "no folder"])
def test_waiting_for_a_run_ends_at_a_signal(tmp_path, place):
    (tmp_path / "run.lock").touch()

    def stop(line):
        os.kill(os.getpid(), signal.SIGTERM)

    assert not watch_run(tmp_path / place, log=stop, every_s=0.05)


@pytest.mark.parametrize("place", ["", "photo.jpg"], ids=["a folder", "a file"])
def test_something_else_is_not_waited_for(tmp_path, place):
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(RunDirectoryError, match=r"no plan.json|no such run"):
        watch_run(tmp_path / place, log=print, every_s=5.0)


def test_looking_at_a_lock_does_not_give_it_up(run):
    with lock_directory(run):
        (owner,) = owners_of(run)
        assert (owner.pid, owner.is_alive) == (os.getpid(), True)
        words = [sys.executable, "-c", _HOLD, str(run)]
        held = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert "is in use by process" in held.stderr
    assert owners_of(run) == ()


def test_ranks_and_restarts_are_on_the_page(run):
    logs = run / LOGS
    logs.mkdir()
    killed = RankError(kind="RankFailed", message="ended", exit_code=1, at=0.0, is_by_another=True)
    write_status(logs, RankStatus(rank=0, pid=7, host="alpha", step=119, doing="backward"))
    write_status(logs, RankStatus(rank=1, pid=8, host="beta", step=118, doing="forward", error=killed))
    files, under_way = RunView(run).look()
    assert under_way.last_sign_s < 600
    page = page_of(files, under_way)
    gone = "rank 1 (process 8 on beta) ended without a word (last seen: forward, step 118)"
    for words in ("process 7 on alpha", "119", gone, "on 2 machines"):
        assert words in page


def test_time_lost_and_elastic_changes_are_summed_up():
    first = Restart(
        cause="a", workers_before=4, workers=3, after_step=10, lost_steps=2, lost_at=100.0, repeated_seconds=4.0,
        again_at=130.0,
    )  # fmt: skip
    second = replace(
        first, workers_before=3, workers=4, lost_steps=5, lost_at=200.0, repeated_seconds=6.0, again_at=201.0
    )
    said = "2 restarts, 41.0 s lost and 7 steps done again; workers: 4 → 3 → 4"
    assert restart_summary([first, second]) == said


def test_the_state_names_what_is_left():
    owner = Owner(pid=4711, host="alpha", since=1000.0, is_alive=True)
    going = UnderWay(
        at=1720.0, owners=(owner,), last_sign_s=3.2, step=120, total_steps=600, remaining_s=2880.0, saved_step=100
    )  # fmt: skip
    assert state_line(going).endswith(
        "(12 min 0 s): step 120 of 600, 48 min 0 s left; last checkpoint at step 100; last sign 3 s ago"
    )
    nobody = UnderWay(at=1720.0, owners=(), last_sign_s=9.0)
    assert state_line(nobody).startswith("nobody runs it, and it wrote no report: no step is done yet")
