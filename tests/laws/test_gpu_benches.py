"""The benchmark of memory on a GPU runs from end to end without one."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_memory_is_compared_by_phase_without_what_reads_data(monkeypatch, tmp_path):
    """datasets and trl are not at hand on every machine with a GPU."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("datasets", "trl"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    for name in ("gpu_cases", "gpu_speed", "gpu_memory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("gpu_speed")
    words = ["gpu_memory.py", "--shapes", "tiny", "--cases", "lora", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert importlib.import_module("gpu_memory").main() == 0
    content = json.loads((tmp_path / "gpu_memory.json").read_text())
    assert content["is_gpu"] is False
    assert [case["recompute"] for case in content["cases"]] == [0, 4]
    for case in content["cases"]:
        for phase, measured in case["phases"]["measured"].items():
            for side in ("predicted", "rehearsed"):
                assert case["phases"][side][phase] == pytest.approx(measured, rel=0.02), (case["case"], phase)
