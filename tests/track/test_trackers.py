"""A tracker is told every step beside the run, under one id, and can neither stop nor slow it."""

import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fitune.errors import MissingExtra, RecipeError
from fitune.files import process_lives
from fitune.recipe.keys import all_keys
from fitune.track import feed
from fitune.track.feed import Trackers
from fitune.track.record import log_of, read_tracked
from fitune.track.trackers import (
    KILLED,
    TRACKERS,
    Beginning,
    End,
    TrackerRow,
    markdown,
    scalars,
    settings_of_environment,
    wanted_trackers,
)
from fitune.values.plan import Tracking
from jsonl import read_lines
from report.conftest import make_run_report

TESTS = Path(__file__).parents[1]
COMPLETE = End(status="complete", figures={"predicted/peak": 3.0})


def row(name):
    return TrackerRow(tracker=f"track.toy_trackers:{name}", library="json", extra="toy")


@pytest.fixture(autouse=True)
def toys_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))


@pytest.fixture
def open_toy(tmp_path, plan, monkeypatch):
    """A started toy tracker by its class, and the lines it says to people."""

    def opened(name, **limits):
        said = []
        for limit, value in {"END_S": 60.0, **limits}.items():
            monkeypatch.setattr(feed, limit, value)
        trackers = Trackers({"toy": row(name)}, tmp_path, say=said.append)
        trackers.start(plan, "a run")
        return trackers, said

    return opened


def told(directory):
    return read_lines(directory / "toy.jsonl")


def finish(trackers, end=COMPLETE):
    """Tell the end; whether a tracker was left behind."""
    trackers.finish(make_run_report())
    return trackers.close(end)


def begun_and_steps(directory):
    """What the attempts began with, and the numbers of their steps."""
    lines = told(directory)
    starts = [place for place, line in enumerate(lines) if "begun" in line]
    parts = [lines[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return [part[0] for part in parts], [[line["step"] for line in part if "step" in line] for part in parts]


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_step_arrives_in_order_and_a_resumed_run_has_the_same_id(open_toy, tmp_path, make_step):
    report = tmp_path / "report.html"
    report.write_text("from s3://me:hunter2@host/rows")
    for steps in (range(1, 41), range(31, 51)):
        trackers, said = open_toy("Toy")
        for step in steps:
            trackers.step(make_step(step, loss=1 / step))
        assert not finish(trackers, End(status="complete", figures={"a": 1.0}, files=(str(report),)))
    (begun, again), steps = begun_and_steps(tmp_path)
    assert steps == [list(range(1, 41)), list(range(31, 51))]
    assert (begun["new"], again["new"]) == (True, False)
    assert begun["begun"] == again["begun"]
    assert begun["settings"]["tuning.kind"]
    end = told(tmp_path)[-1]
    assert (end["ended"], end["figures"]) == ("complete", {"a": 1.0})
    assert end["files"] == {"report.html": "from s3://[hidden]@host/rows"}
    (tracked,) = read_tracked(tmp_path)
    assert (tracked.sent, tracked.lost, tracked.failure) == (60, 0, "")
    assert said[-1] == f"tracker toy: 60 steps; https://toy.example/{begun['begun']}"
    assert "words of a library" in log_of(tmp_path, "toy").read_text()


@pytest.mark.parametrize(("name", "sent"), [("Hangs", 0), ("HangsAtTheEnd", 1)])
def test_a_tracker_that_hangs_holds_nothing_up_and_is_ended(name, sent, open_toy, tmp_path, make_step):
    trackers, said = open_toy(name, END_S=0.5, MOST_WAITING=10)
    until((tmp_path / "toy.jsonl").is_file)
    for step in range(1, 2 if sent else 101):
        trackers.step(make_step(step))
    until(lambda: trackers.tracked[0].sent == sent)
    assert finish(trackers)  # the tracker sleeps for an hour
    (tracked,) = read_tracked(tmp_path)
    assert (tracked.sent, tracked.lost) == (sent, 0 if sent else 100)
    assert tracked.failure == "no answer within 0.5 s of the run's end"
    assert ("100 lost" in said[-1]) == (not sent)
    until(lambda: not process_lives(told(tmp_path)[0]["pid"]))


def test_a_tracker_that_fails_begins_again_and_misses_nothing(open_toy, tmp_path, make_step):
    trackers, said = open_toy("FailsOnce", PAUSES_S=(0.0,))
    for step in range(1, 6):
        trackers.step(make_step(step))
    until(lambda: trackers.tracked[0].sent == 5)
    assert not finish(trackers)
    begun, steps = begun_and_steps(tmp_path)
    assert set().union(*steps) == {1, 2, 3, 4, 5}
    assert len({line["begun"] for line in begun}) == 1
    assert "hunter2" not in " ".join(said)


@pytest.mark.parametrize(
    ("name", "cause"),
    [("Refuses", "PermissionError: no such project"), ("Dies", "its process ended (signal SIGKILL)")],
)
def test_a_tracker_that_keeps_failing_is_left_out_and_says_why(name, cause, open_toy, tmp_path, make_step):
    trackers, said = open_toy(name, PAUSES_S=(0.0,))
    trackers.step(make_step(1))
    until(lambda: trackers.tracked[0].lost == 1)
    trackers.step(make_step(2))
    assert finish(trackers)
    assert any(f"failed: {cause}; it is left out from here on" in line for line in said)
    assert said[-1].startswith("tracker toy: 0 steps, 2 lost; ")
    assert said[-1].endswith(f"failed: {cause}")
    assert sum("begun" in line for line in told(tmp_path)) == 2


def test_the_tracker_of_a_killed_run_is_ended(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from plans import plan_for, small_llama;"
        "from fitune.track.feed import Trackers; from fitune.track.trackers import TrackerRow;"
        "row = TrackerRow(tracker='track.toy_trackers:Toy', library='json', extra='toy');"
        "Trackers({'toy': row}, Path(sys.argv[1]), say=print).start(plan_for(small_llama()), 'run'); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as run:
        until(lambda: [one for one in read_tracked(tmp_path) if one.has_begun])
        os.kill(run.pid, signal.SIGKILL)
    until(lambda: told(tmp_path)[-1].get("ended") == "interrupted")
    until(lambda: not process_lives(told(tmp_path)[0]["pid"]))


def test_trackers_are_wanted_by_name_and_others_are_refused(monkeypatch):
    monkeypatch.setitem(TRACKERS, "toy", row("Toy"))
    assert wanted_trackers(["Toy"]) == {"toy": TRACKERS["toy"]}
    assert wanted_trackers([]) == wanted_trackers(["none"]) == {}
    with pytest.raises(RecipeError, match="none goes with no other"):
        wanted_trackers(["none", "wandb"])
    for names in (["tensorbord"], ["all", "tensorbord"]):
        with pytest.raises(RecipeError, match="unknown tracker 'tensorbord'") as caught:
            wanted_trackers(names)
        assert caught.value.hint == "did you mean 'tensorboard'?"


def test_a_tracker_without_its_library_names_the_command(monkeypatch):
    monkeypatch.setitem(TRACKERS, "away", TrackerRow(tracker="a:B", library="no_such_library", extra="away"))
    assert "away" not in wanted_trackers(["all"])
    for names in (["away"], ["all", "away"]):
        with pytest.raises(MissingExtra, match="fitune\\[away\\]"):
            wanted_trackers(names)


def test_each_tracker_has_its_extra_and_its_word_in_the_help():
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    assert {row.extra for row in TRACKERS.values()} <= set(project["optional-dependencies"])
    [about] = [key.about for key in all_keys() if key.name == "report_to"]
    assert all(name in about for name in TRACKERS)


def test_keys_and_passwords_of_trackers_stay_on_this_machine():
    environment = {
        "WANDB_PROJECT": "p", "WANDB_API_KEY": "k" * 40, "MLFLOW_TRACKING_URI": "https://me:hunter2@host",
        "MLFLOW_TRACKING_TOKEN": "t", "COMET_WORKSPACE": "w", "HOME": "/root",
    }  # fmt: skip
    assert dict(settings_of_environment(environment)) == {"WANDB_PROJECT": "p", "COMET_WORKSPACE": "w"}


def test_every_number_of_a_step_is_a_curve(make_step):
    report = make_step(7, eval_loss=2.5, mfu=0.4)
    curves = dict(scalars(report))
    said = {
        "train/loss": report.loss,
        "eval/loss": 2.5,
        "speed/mfu": 0.4,
        "memory_bytes/backward": 412 * 1024**2,
    }
    assert curves.items() >= said.items()
    assert not {"eval/loss", "speed/mfu"} & dict(scalars(make_step(8))).keys()  # neither is known: no zeros


def test_a_table_in_markdown():
    assert markdown((("", "predicted"), ("peak", "3"))) == "|  | predicted |\n| --- | --- |\n| peak | 3 |"


def test_the_command_of_tensorboard_can_be_pasted(tmp_path):
    pytest.importorskip("tensorboard")
    from fitune.track.tensorboard import TensorBoard

    directory = tmp_path / "my first run"
    directory.mkdir()
    words = {"run_id": "1", "is_new": True, "name": "run", "directory": str(directory), "plan": "{}"}
    tracker = TensorBoard()
    where = tracker.start(Beginning(tracking=Tracking(), **words))
    tracker.finish(KILLED)
    assert shlex.split(where.command) == ["tensorboard", "--logdir", str(directory / "tensorboard")]
