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


def with_all_away(plan):
    return replace(plan, offload=ALL_THREE)


@pytest.mark.parametrize(("tuning", "export"), [("lora", "merged"), ("full", "full")])
def test_the_run_is_the_one_without_and_resumes_bit_for_bit(make_plan, tmp_path, tuning, export):
    common = {"max_steps": 4, "save_steps": 2, "tuning": tuning, "export": export, "precision": "fp32"}
    here, *away = (make_plan(**common, output_dir=str(tmp_path / name)) for name in ("here", "one", "two"))
    report = trained(here)
    straight = stopped_and_resumed(*map(with_all_away, away))
    assert losses(here) == losses(away[0])
    assert same_weights(report.exported, straight.exported)


def test_the_host_is_not_counted_as_the_device(make_plan, tmp_path):
    common = {"max_steps": 3, "tuning": "full", "export": "full", "precision": "fp32"}
    here = trained(make_plan(**common, output_dir=str(tmp_path / "here")))
    away = trained(with_all_away(make_plan(**common, output_dir=str(tmp_path / "away"))))
    peaks = [max(report.memory.phases.values()) for report in (here, away)]
    assert peaks[1] < 0.7 * peaks[0]
