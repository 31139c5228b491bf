"""Memory runs out on one rank of two: the job begins anew from its last checkpoint, with the same global batch."""

import os
import subprocess
import sys

import pytest

from conftest import settings_of
from faults import one_rank_out_of_memory
from runs import (
    assert_close,
    report_of,
    set_words,
    trained,
)


def failing_once(directory, settings, failed):
    return subprocess.run(
        [sys.executable, one_rank_out_of_memory.__file__, "train", *set_words(settings | {"output_dir": directory})],
        capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "FAILED": str(failed)},
    )  # fmt: skip


@pytest.mark.slow
def test_both_ranks_go_on_with_half_the_micro_batch(make_plan, tmp_path, model_folder, data_file):
    """And with the losses of one process."""
    common = {"max_steps": 4, "save_steps": 1}
    alone = make_plan(**common, micro_batch_size=8, gradient_accumulation_steps=1)
    trained(alone)
    settings = settings_of(
        model_folder, data_file, "", **common, gpus=2, zero=3, gradient_accumulation_steps=1
    )
    broken = failing_once(tmp_path / "broken", settings, tmp_path / "once")
    assert broken.returncode == 0, broken.stderr
    report = report_of(tmp_path / "broken")
    (retry,) = report.retries
    assert (report.status, retry.after_step) == ("complete", 2)
    assert retry.reason.startswith("rank 1: out of memory")
    assert "micro_batch_size 2 × 2 accumulated" in retry.after
    assert_close(tmp_path / "broken", alone)
