"""A run that goes on from an older step, and is killed, goes on where it was then."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.checkpoint.commit import read_commit
from fitune.train.run import run
from fitune.values.plan import Steps
from runs import (
    callbacks,
    losses,
    steps_of,
    trained,
)

COMMON = {"save_steps": 2, "keep_checkpoints": 3, "lr_scheduler": "constant", "warmup_steps": 0}


def dying_after(steps):
    left = [steps]

    def stop_asked():
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return False

    return stop_asked


def test_killed_on_its_new_line_a_run_goes_on_there(make_plan, tmp_path):
    plan = make_plan(**COMMON, max_steps=12)
    checkpoints = Path(plan.run.output_dir) / "checkpoints"
    trained(plan)
    longer = replace(plan, schedule=replace(plan.schedule, duration=Steps(count=16)))
    with pytest.raises(KeyboardInterrupt):
        run(
            longer,
            callbacks=replace(callbacks(), stop_asked=dying_after(3)),
            resume=str(checkpoints / "step-8"),
        )
    said = []
    report = trained(longer, on_note=said.append, resume=True)
    assert f"resuming from {checkpoints / 'step-10'}" in said
    assert (report.status, report.reason) == ("complete", "")
    assert [step.step for step in steps_of(plan)] == list(range(1, 17))
    straight = make_plan(**COMMON, max_steps=16, output_dir=str(tmp_path / "straight"))
    trained(straight)
    assert losses(plan) == losses(straight)
    assert [attempt.after for attempt in read_commit(checkpoints / "step-16").line] == [0, 8, 10]


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_steps(make_plan, monkeypatch):
    """The four steps before the stop are made to have taken 1,000 s each."""
    plan = make_plan(**COMMON, max_steps=6)
    run(plan, callbacks=callbacks(stop_after=4))
    earlier = [replace(step, step_seconds=1000.0, data_seconds=0.0) for step in steps_of(plan)]
    assert len(earlier) == 4
    monkeypatch.setattr(sys.modules[run.__module__], "read_metrics", lambda _: earlier)
    report = run(plan, callbacks=callbacks(), resume=True)
    assert (report.status, report.steps) == ("complete", 6)
    assert 4000 < report.seconds < 5000
