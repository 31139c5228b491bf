"""Row 1 of the fault table for several processes: a run of two that is killed with -9 ends like one that is not."""

import json
import os
import subprocess
import sys

import pytest

from train import killed_ranks


@pytest.mark.weekly
def test_a_run_that_is_killed_and_goes_on_ends_like_the_undisturbed_one(tmp_path, model_folder, data_file):
    """Killed twice while it saves beside its steps and once while it waits for its saves."""
    words = [tmp_path / "runs", model_folder, data_file, "--kills", 3, "--steps", 8, "--seed", 3]
    words += ["--async-save", "by turns"]
    printed = subprocess.run(
        [sys.executable, killed_ranks.__file__, *map(str, words)],
        capture_output=True, text=True, timeout=1800, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    seen = json.loads(printed.stdout)
    assert seen["kills"] == 3
    assert seen["ended like the undisturbed run"] >= 1
