"""Memory runs out on one rank of two: the job begins anew from its last checkpoint, with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import one_rank_out_of_memory
from fitune.track.metrics import read_metrics
from fitune.train.run import run
from train.test_run import callbacks


def trained(directory, settings, failed):
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return subprocess.run(
        [sys.executable, one_rank_out_of_memory.__file__, "train", *words, "--set", f"output_dir={directory}"],
        capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "FAILED": str(failed)},
    )  # fmt: skip


@pytest.mark.slow
def test_both_ranks_go_on_with_half_the_micro_batch(make_plan, tmp_path, model_folder, data_file):
    """And with the losses of one process."""
    common = {"tuning": "lora", "lora_r": 4, "learning_rate": 1e-2, "max_steps": 4, "save_steps": 1}
    alone = make_plan(**common, micro_batch_size=8, gradient_accumulation_steps=1)
    run(alone, callbacks=callbacks())
    settings = {
        **common, "model": model_folder, "data": data_file, "precision": "fp32", "gpu": "cpu", "gpus": 2, "zero": 3,
        "seq_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "samples": 0,
    }  # fmt: skip
    broken = trained(tmp_path / "broken", settings, tmp_path / "once")
    assert broken.returncode == 0, broken.stderr
    report = json.loads((tmp_path / "broken" / "report.json").read_text())
    (retry,) = report["retries"]
    assert (report["status"], retry["after_step"]) == ("complete", 2)
    assert retry["reason"].startswith("rank 1: out of memory")
    assert "micro_batch_size 2 × 2 accumulated" in retry["after"]
    ours, theirs = (
        [step.loss for step in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path / "broken", Path(alone.run.output_dir))
    )
    assert ours == pytest.approx(theirs, abs=1e-5)
