"""Whole runs with everything on the host: the same losses, a resume bit for bit, exports that are verified."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitune.spec.plan import Offload
from fitune.train.run import run
from train.test_run import callbacks, losses

ALL_THREE = Offload(parameters="cpu", optimizer="cpu", activations="cpu")


def with_all_away(plan):
    return replace(plan, offload=ALL_THREE)


@pytest.mark.parametrize(
    ("tuning", "export", "file"),
    [("lora", "merged", "model.safetensors"), ("full", "full", "model.safetensors")],
)
def test_the_run_is_the_one_without_and_resumes_bit_for_bit(make_plan, tmp_path, tuning, export, file):
    common = {"max_steps": 4, "save_steps": 2, "tuning": tuning, "export": export, "precision": "fp32"}
    here = make_plan(**common, output_dir=str(tmp_path / "here"))
    straight = with_all_away(make_plan(**common, output_dir=str(tmp_path / "straight")))
    broken = with_all_away(make_plan(**common, output_dir=str(tmp_path / "broken")))
    reports = [run(here, callbacks=callbacks()), run(straight, callbacks=callbacks())]
    run(broken, callbacks=callbacks(stop_after=3))
    reports.append(run(broken, callbacks=callbacks(), resume=True))
    assert losses(here) == losses(straight) == losses(broken)
    written = [load_file(Path(report.exported) / file) for report in reports]
    for name, tensor in written[0].items():
        assert all(torch.equal(tensor, other[name]) for other in written[1:]), name


def test_the_host_is_not_counted_as_the_device(make_plan, tmp_path):
    common = {"max_steps": 3, "tuning": "full", "export": "full", "precision": "fp32"}
    here = run(make_plan(**common, output_dir=str(tmp_path / "here")), callbacks=callbacks())
    away = run(with_all_away(make_plan(**common, output_dir=str(tmp_path / "away"))), callbacks=callbacks())
    peaks = [max(report.memory.phases.values()) for report in (here, away)]
    assert peaks[1] < 0.7 * peaks[0]
