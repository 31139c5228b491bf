"""``fitune doctor`` shows what was measured, ``fitune plan`` says what it counted with."""

import importlib.metadata
import json
from functools import partial

import pytest
from typer.testing import CliRunner

from fitune.cli.app import app
from fitune.errors import HardwareError
from fitune.measure import calibrate as measuring
from fitune.measure.hardware import detect_hardware
from fitune.measure.measurements import device_key, store_calibration, stored_calibration
from fitune.session import doctor as examination
from fitune.session.doctor import _EXTRAS, calibrate_device
from fitune.values.machines.hardware import AttentionRate, Calibration, Rate, Traffic


def calibration():
    return Calibration(
        device=this_device(), date="2026-11-21", threads=2,
        products=(Rate(numbers="fp32", flops=80e9, start_seconds=1e-5),),
        attention=(AttentionRate(numbers="fp32", flops=40e9, row_tokens=64),),
        traffic=(Traffic(tensor_bytes=2**20, bandwidth=30e9),), forward_launch_seconds=15e-6,
        backward_launch_seconds=9e-6, cpu_adam=5e8,
    )  # fmt: skip


def this_device():
    hardware = detect_hardware()
    return device_key(hardware.gpu, cores=hardware.cpu_cores)


def test_every_extra_is_known_to_the_doctor():
    extras = set(importlib.metadata.metadata("fitune").get_all("Provides-Extra"))
    assert {extra for extra, _ in _EXTRAS.values()} == extras - {"dev", "bench", "track"}


def answer(*words):
    return CliRunner().invoke(app, words, catch_exceptions=False).output


@pytest.fixture
def doctor(monkeypatch):
    """What it prints, without looking for the largest models, which takes seconds."""
    monkeypatch.setattr(examination, "largest_here", lambda hardware: {})
    return partial(answer, "doctor")


def test_the_largest_models_that_this_machine_trains_are_shown(monkeypatch):
    """Of a few that are known: all of them take seconds."""
    known = ("Qwen/Qwen3-0.6B", "openai-community/gpt2", "meta-llama/Llama-2-70b-hf")
    monkeypatch.setattr("fitune.planner.nothing_fits.names_with_formulas", lambda: known)
    examined = json.loads(answer("doctor", "--json"))
    assert {"full", "lora", "qlora"} >= set(examined["largest"]) >= {"lora"}
    assert set(examined["largest"].values()) <= set(known)
    assert examined["hardware"]["calibration"] is None


def test_what_was_measured_is_shown(doctor):
    text = doctor()
    assert text.startswith("no GPU found")
    assert "fitune doctor --calibrate" in text
    store_calibration(calibration())
    text = doctor()
    for shown in ("calibrated on 2026-11-21", "products 0.08 TFLOP/s fp32", "15 µs in forward"):
        assert shown in text
    assert json.loads(doctor("--json"))["hardware"]["calibration"]["cpu_adam"] == 5e8


def test_what_is_measured_is_stored_and_replaces_a_damaged_file(doctor, monkeypatch):
    monkeypatch.setattr(measuring, "calibrate", lambda hardware: calibration())
    store_calibration(calibration()).write_text("{")
    assert "calibrated on" in doctor("--calibrate")
    said = []
    assert calibrate_device(log=said.append)
    assert said[-1].startswith("measured ")
    assert stored_calibration(this_device()) == calibration()


PLAN = ["plan", "--model", "qwen3-0.6b", "--gpu", "cpu", "--host-memory", "64GiB"]


def test_a_damaged_calibration_stops_the_doctor_and_the_plan_with_what_to_do():
    store_calibration(calibration()).write_text("{")
    for words in (["doctor"], PLAN):
        with pytest.raises(HardwareError, match="cannot be read") as refused:
            answer(*words)
        assert "--calibrate" in (refused.value.hint or "")


def test_a_plan_says_what_its_seconds_come_from():
    assert "assumed rates" in " ".join(answer(*PLAN).split())
    store_calibration(calibration())
    assert "calibrated on 2026-11-21" in " ".join(answer(*PLAN).split())
