"""A run goes on: from an older step and killed there, longer, under other settings, not on a base that changed."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.killed_saves import save, state_of
from fitune.checkpoint.commit import read_commit
from fitune.errors import CheckpointError
from fitune.report.compare import measure
from fitune.train.run import run
from fitune.values.plan import Steps
from fitune.values.predictions import Phase
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
    assert said[0].startswith(f"verifying {checkpoints / 'step-10'}: ")
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


def test_a_checkpoint_of_another_version_is_refused_in_words(make_plan, tmp_path):
    path = save(tmp_path / "other", state_of(1), keep=1, eval_loss=None)
    said = "checkpoint of step 1 cannot be used: Facts: missing key .*another version of fitune"
    with pytest.raises(CheckpointError, match=said) as refused:
        trained(make_plan(max_steps=2), resume=str(path))
    assert str(refused.value.hint).startswith("go on with the version of fitune that saved it")


def peak(plan, *, after=0):
    return max(max(step.memory_bytes.values(), default=0) for step in steps_of(plan) if step.step > after)


def test_memory_and_speed_are_of_the_plan_that_ended_the_run(make_plan, tmp_path):
    common = {"tuning": "full", "max_steps": 8, "save_steps": 4}
    first = make_plan(**common, micro_batch_size=8, gradient_accumulation_steps=1)
    trained(first, stop_after=4)
    second = make_plan(**common, micro_batch_size=2, gradient_accumulation_steps=4)
    said = []
    trained(second, stop_after=2, on_note=said.append, resume=True)
    report = trained(second, resume=True)  # once more, under the same settings
    assert any("batch.micro_batch_size" in line and "8 × 1" in line for line in said)
    assert report.steps_of_other_plan == 4
    assert report.memory is not None
    assert report.memory.peak_bytes == peak(second, after=4) < peak(second)
    assert report.tokens == sum(step.tokens for step in steps_of(second))
    seconds = [step.step_seconds for step in steps_of(second)[5:] if not step.memory_bytes]
    assert measure(report, steps_of(second)).step_seconds == sum(seconds) / len(seconds)


def test_a_run_that_is_only_made_longer_keeps_its_measures(make_plan):
    plan = make_plan(max_steps=4, save_steps=4, lr_scheduler="constant", warmup_steps=0)
    trained(plan)
    longer = replace(plan, schedule=replace(plan.schedule, duration=Steps(count=7)))
    report = trained(longer, resume=True)
    assert report.steps_of_other_plan == 0
    assert [step.step for step in steps_of(plan)] == list(range(1, 8))
    assert report.memory is not None
    assert report.memory.phases[Phase.FORWARD] == max(
        s.memory_bytes.get(Phase.FORWARD, 0) for s in steps_of(plan)
    )


def test_another_frozen_base_under_the_same_path_is_refused(make_plan, model_folder, tmp_path):
    """What counts are the weights that were loaded, not those that lay there when the checkpoint was saved."""
    base = tmp_path / "base"
    shutil.copytree(model_folder, base)
    plan = make_plan(model=str(base), max_steps=4, save_steps=2)
    plain = callbacks(stop_after=2)

    def stop_asked():
        content = bytearray((base / "model.safetensors").read_bytes())
        content[len(content) // 2] = 0x5A
        (base / "model.safetensors").write_bytes(content)
        return plain.stop_asked()

    run(plan, callbacks=replace(plain, stop_asked=stop_asked))
    with pytest.raises(CheckpointError, match=r"the weights in .*base changed since step 2 was saved"):
        trained(plan, resume=True)
