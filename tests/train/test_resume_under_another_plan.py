"""A run that goes on under other settings says so, and its figures are of the settings it ended with."""

import shutil
from dataclasses import replace

import pytest

from fitune.errors import CheckpointError
from fitune.report.compare import measure
from fitune.train.run import run
from fitune.values.plan import Steps
from fitune.values.predictions import Phase
from runs import (
    callbacks,
    steps_of,
    trained,
)


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
