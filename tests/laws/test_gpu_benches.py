"""The benchmarks for a GPU run from end to end without one: what they compare is the same step on both sides."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from models.streams import forward_backward

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def benches(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return BENCH


def test_memory_is_compared_by_phase_without_what_reads_data(benches, monkeypatch, tmp_path):
    """datasets and trl are not at hand on every machine with a GPU."""
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


@pytest.mark.slow
def test_both_sides_begin_with_the_same_loss(benches):
    """The same random weights, rows and trained linears; NF4 packed by fitune and by bitsandbytes."""
    pytest.importorskip("bitsandbytes")
    cases, peers = importlib.import_module("gpu_cases"), importlib.import_module("gpu_peer")
    prepare = importlib.import_module("fitune.train.prepare")
    shape, case = cases.SHAPES["tiny"], cases.CASES["qlora"]
    plan = cases.plan_of(case, shape, hardware=cases.hardware_here(), rows=1)
    device = prepare.training_device(plan)
    prepared = prepare.prepare_loaded(
        cases.random_model(plan, cases.config_of(shape), device), plan, device=device
    )
    rows = cases.full_rows(plan)
    loss = forward_backward(prepared.engine, rows)
    theirs = peers.peer_of(case, shape, plan, device, recompute=False).step()
    assert loss.item() / rows.supervised_tokens == pytest.approx(theirs, rel=1e-3)  # bf16
