"""Memory runs out on one rank of two: the job begins anew from its last checkpoint, with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import one_rank_out_of_memory
from fitune.track.metrics import read_metrics


def trained(directory: Path, settings: dict[str, object], failed: Path) -> subprocess.CompletedProcess[str]:
    words = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return subprocess.run(
        [sys.executable, one_rank_out_of_memory.__file__, "train", *words, "--set", f"output_dir={directory}"],
        capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "FAILED": str(failed)},
    )  # fmt: skip


@pytest.mark.slow
def test_both_ranks_go_on_with_half_the_micro_batch(
    tmp_path: Path, model_folder: Path, data_file: Path
) -> None:
    settings = {
        "model": model_folder, "data": data_file, "tuning": "lora", "precision": "fp32", "gpu": "cpu", "gpus": 2,
        "zero": 3, "seq_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 4,
        "samples": 0, "save_steps": 1,
    }  # fmt: skip
    (tmp_path / "never").touch()
    straight = trained(tmp_path / "straight", settings, tmp_path / "never")
    assert straight.returncode == 0, straight.stderr
    broken = trained(tmp_path / "broken", settings, tmp_path / "once")
    assert broken.returncode == 0, broken.stderr
    report = json.loads((tmp_path / "broken" / "report.json").read_text())
    (retry,) = report["retries"]
    assert (report["status"], retry["after_step"]) == ("complete", 2)
    assert retry["reason"].startswith("rank 1: out of memory")
    assert "micro_batch_size 2 × 2 accumulated" in retry["after"]
    losses = [
        [s.loss for s in read_metrics(tmp_path / run / "metrics.jsonl")] for run in ("straight", "broken")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
