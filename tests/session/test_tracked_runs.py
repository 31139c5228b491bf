"""A run and its trackers from start to end: one id over resumes and attempts, the report attached, the page says so."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import fitune
from faults.budgets import Budget
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import RecipeError
from fitune.session.events import Note
from fitune.session.train.training import tracked
from fitune.track.record import read_tracked
from fitune.track.trackers import TRACKERS, TrackerRow
from fitune.train.directory import remove_run
from jsonl import read_lines
from runs import steps_of

TESTS = Path(__file__).parents[1]


@pytest.fixture
def settings(settings, monkeypatch):
    monkeypatch.syspath_prepend(TESTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setitem(
        TRACKERS, "toy", TrackerRow(tracker="track.toy_trackers:Toy", library="json", extra="toy")
    )
    one = {"micro_batch_size": 16, "gradient_accumulation_steps": 1, "loss": "plain", "save_steps": 1}
    return settings | one | {"report_to": "toy", "run_name": "first"}


def test_a_tracked_run_is_one_run_over_resumes_and_attempts(settings, tmp_path):
    directory, notes = tmp_path / "run", list[str]()

    def tell(event):
        if isinstance(event, Note):
            notes.append(event.text)

    with Budget() as device:
        fitune.train(progress=tell, **settings)
    with Budget(int(0.9 * device.peak_bytes)) as smaller:
        fitune.train(progress=tell, **settings | {"max_steps": 4, "resume": True})
    assert smaller.refusals == 1

    lines = read_lines(directory / "toy.jsonl")
    begun = [line for line in lines if "begun" in line]
    assert [line["new"] for line in begun] == [True, *(False for _ in begun[1:])]
    assert {line["begun"] for line in begun} == {read_tracked(directory)[0].run_id}
    assert begun[0]["name"] == "first"
    losses = {line["step"]: line["loss"] for line in lines if "step" in line}
    assert losses == {step.step: step.loss for step in steps_of(directory)}

    end = lines[-1]
    assert end["ended"] == "complete"
    assert end["figures"]["measured/peak_of_tensors"] > 0
    assert end["figures"]["predicted/peak_of_tensors"] > 0
    assert json.loads(end["files"]["report.json"])["train_data"]["rows_kept"] == 56
    link = f"https://toy.example/{begun[0]['begun']}"
    page = end["files"]["report.html"]
    assert f'<a href="{link}">toy</a>' in page
    assert re.sub(r"\s", "", page) == re.sub(r"\s", "", (directory / "report.html").read_text())
    assert any(link in note for note in notes)
    assert link in fitune.explain(fitune.report(directory))

    remove_run(directory)  # as --overwrite does
    assert read_tracked(directory) == ()


def test_only_the_first_rank_tracks(settings):
    plan = fitune.plan(**settings).chosen.plan
    with tracked(plan, emit=print, ranks=Ranks(rank=1, world=2)) as sinks:
        assert sinks == ()
    with tracked(plan, emit=print, ranks=ALONE) as sinks:
        assert len(sinks) == 1  # and a run that never came to a step tells it nothing
    assert read_tracked(Path(plan.run.output_dir)) == ()


def test_a_tracker_that_cannot_be_is_refused_before_the_data_is_read(settings):
    with pytest.raises(RecipeError, match="unknown tracker 'tensorbord'"):
        fitune.train(**settings | {"report_to": "tensorbord", "data": "nowhere.jsonl"})
