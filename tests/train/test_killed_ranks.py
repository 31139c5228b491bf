"""Row 1 of the fault table for several processes: a run of two that is killed with -9 ends like one that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train import killed_ranks


@pytest.mark.slow
@pytest.mark.parametrize("saving", [[], ["--async-save"]])
def test_a_run_that_is_killed_and_goes_on_ends_like_the_undisturbed_one(
    tmp_path: Path, model_folder: Path, data_file: Path, saving: list[str]
) -> None:
    words = [tmp_path / "runs", model_folder, data_file, "--kills", 2, "--steps", 8, "--seed", 3, *saving]
    printed = subprocess.run(
        [sys.executable, killed_ranks.__file__, *map(str, words)],
        capture_output=True, text=True, timeout=1800, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    seen = json.loads(printed.stdout)
    assert seen["kills"] == 2
    assert seen["ended like the undisturbed run"] >= 1
