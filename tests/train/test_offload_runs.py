"""Whole runs with everything on the host: the same losses, a resume bit for bit, exports that are verified."""

from dataclasses import replace

import pytest

from fitune.values.plan import Offload
from runs import (
    losses,
    same_weights,
    stopped_and_resumed,
    trained,
)

ALL_THREE = Offload(parameters="cpu", optimizer="cpu", activations="cpu")


@pytest.mark.parametrize(("tuning", "export", "share"), [("lora", "merged", 1.0), ("full", "full", 0.7)])
def test_the_run_is_the_one_without_and_resumes_bit_for_bit(make_plan, tmp_path, tuning, export, share):
    """And what is on the host is not counted as the device's."""
    common = {"max_steps": 4, "save_steps": 2, "tuning": tuning, "export": export, "precision": "fp32"}
    here, *away = (make_plan(**common, output_dir=str(tmp_path / name)) for name in ("here", "one", "two"))
    report = trained(here)
    straight = stopped_and_resumed(*(replace(plan, offload=ALL_THREE) for plan in away))
    assert losses(here) == losses(away[0])
    assert same_weights(report.exported, straight.exported)
    peaks = [max(each.memory.phases.values()) for each in (report, straight)]
    assert peaks[1] < share * peaks[0]
