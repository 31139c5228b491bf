"""Proofs on disk: what was measured on a kind of card is what plans for it cite; a damaged file says what to do."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fitune.cli.app import app
from fitune.errors import HardwareError
from fitune.measure import measurements
from fitune.measure.hardware import resolve_hardware
from fitune.measure.measurements import Proof, ProofCheck, ProvedPlan, measured_by, measured_on, store_proof
from fitune.values.machines.hardware import Measured


def row(name="lora", *, measured=1000, seconds=1.0):
    return ProvedPlan(
        id=name, predicted=1000, measured=measured, reserved_predicted=1200, reserved=1210, predicted_s=1.0,
        measured_s=seconds, tokens=4096,
    )  # fmt: skip


def proof(*rows, **different):
    made = Proof(
        device="rtx-4090", card="0123", date="2026-11-25T10:00:00", gpu="NVIDIA GeForce RTX 4090", capability=(8, 9),
        memory_bytes=24 * 2**30, versions={"torch": "2.13.0"}, rows=rows,
        checks=(ProofCheck(name="fused loss bf16", passed=True, figures={"error": 1e-3}),),
    )  # fmt: skip
    return replace(made, **different)


def test_memory_is_the_furthest_plan_and_speed_the_median():
    rows = row(measured=1004), row("qlora", measured=998, seconds=1.25), row("full", seconds=2.0)
    found = measured_by([proof(*rows)])
    assert found == Measured(cards=1, memory_error=pytest.approx(0.004), speed_error=pytest.approx(-0.2))


def test_the_newest_proof_of_each_card_counts():
    old = proof(row(measured=1500), date="2026-01-01T00:00:00")
    empty = proof(date="2027-01-01T00:00:00")  # ended before its first plan
    other = proof(row(measured=990), card="4567")
    assert measured_by([old, proof(row()), empty, other]) == Measured(
        cards=2, memory_error=pytest.approx(0.01), speed_error=0.0
    )
    assert measured_by([empty]) is None


def test_a_kind_was_measured_here_or_by_a_contributor(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "CONTRIBUTED", tmp_path)
    assert measured_on("rtx-4090") is None
    store_proof(proof(row()))
    store_proof(proof(row(measured=1010), card="4567"), tmp_path / "proof-rtx-4090-from-somebody.json")
    store_proof(proof(row(measured=2000), device="rtx-4090-d"), tmp_path / "proof-rtx-4090-d-1.json")
    assert measured_on("rtx-4090") == Measured(cards=2, memory_error=pytest.approx(0.01), speed_error=0.0)
    assert resolve_hardware(gpu="rtx-4090").measured == measured_on("rtx-4090")
    assert resolve_hardware(gpu="h100").measured is None


def test_a_plan_cites_what_was_measured():
    words = ["plan", "--model", "qwen3-0.6b", "--gpu", "rtx-4090", "--details"]
    said = "measured on 1 card of this kind: memory ±0.4 %, speed -6 %"
    assert said not in CliRunner().invoke(app, words, catch_exceptions=False).output
    store_proof(proof(row(measured=1004, seconds=1 / 0.94)))
    assert said in " ".join(CliRunner().invoke(app, words, catch_exceptions=False).output.split())
    shown = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).output)
    assert said in shown["decisions"]


@pytest.mark.parametrize("change", [lambda text: text[:-20], lambda text: text.replace('"card"', '"car"')])
def test_a_damaged_proof_is_named(change):
    path = store_proof(proof(row()))
    path.write_text(change(path.read_text()))
    with pytest.raises(HardwareError, match=str(path)) as refused:
        measured_on("rtx-4090")
    assert "fitune doctor --prove" in refused.value.hint


def test_no_proof_is_overwritten_by_a_later_one():
    first = store_proof(proof(row()))
    second = store_proof(proof(date="2026-11-26T10:00:00"))
    assert first != second
    assert first.exists()
