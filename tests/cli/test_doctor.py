"""``fitune doctor`` shows what was measured, ``fitune plan`` says what it counted with."""

import importlib.metadata
import json

import pytest
from typer.testing import CliRunner

from fitune.cli.app import app
from fitune.errors import HardwareError
from fitune.measure import calibrate as measuring
from fitune.measure.calibrations import calibrations_folder, device_key, store_calibration, stored_calibration
from fitune.measure.hardware import detect_hardware
from fitune.session.doctor import _EXTRAS, calibrate_device
from fitune.spec.machines.hardware import AttentionRate, Calibration, Rate, Traffic


def calibration(device):
    return Calibration(
        device=device,
        date="2026-11-21",
        threads=2,
        products=(Rate(numbers="fp32", flops=80e9, start_seconds=1e-5),),
        attention=(AttentionRate(numbers="fp32", flops=40e9, row_tokens=64),),
        traffic=(Traffic(tensor_bytes=2**20, bandwidth=30e9),),
        forward_launch_seconds=15e-6,
        backward_launch_seconds=9e-6,
        cpu_adam=5e8,
    )


def this_device():
    hardware = detect_hardware()
    return device_key(hardware.gpu, cores=hardware.cpu_cores)


def test_every_extra_is_known_to_the_doctor():
    extras = set(importlib.metadata.metadata("fitune").get_all("Provides-Extra"))
    assert {extra for extra, _ in _EXTRAS.values()} == extras - {"dev", "bench", "track"}


def doctor(*words):
    answer = CliRunner().invoke(app, ["doctor", *words], catch_exceptions=False)
    assert answer.exit_code == 0
    return answer.output


def test_what_was_measured_is_shown():
    assert "fitune doctor --calibrate" in doctor()
    assert doctor().startswith("no GPU found")
    assert {"full", "lora", "qlora"} >= set(json.loads(doctor("--json"))["largest"])
    assert json.loads(doctor("--json"))["hardware"]["calibration"] is None
    store_calibration(calibration(this_device()))
    text = doctor()
    assert "calibrated on 2026-11-21" in text
    assert "products 0.08 TFLOP/s fp32" in text
    assert "15 µs in forward" in text
    assert json.loads(doctor("--json"))["hardware"]["calibration"]["cpu_adam"] == 5e8


def test_what_is_measured_is_stored(monkeypatch):
    monkeypatch.setattr(measuring, "calibrate", lambda hardware: calibration(this_device()))
    said = []
    assert calibrate_device(log=said.append)
    assert said[-1].startswith("measured ")
    assert stored_calibration(this_device()) == calibration(this_device())


def test_a_damaged_calibration_stops_the_doctor_and_the_plan_with_what_to_do():
    path = store_calibration(calibration(this_device()))
    path.write_text("{")
    for words in (["doctor"], ["plan", "--model", "qwen3-0.6b", "--gpu", "cpu"]):
        with pytest.raises(HardwareError, match="cannot be read") as refused:
            CliRunner().invoke(app, words, catch_exceptions=False)
        assert "--calibrate" in (refused.value.hint or "")


def test_measuring_again_replaces_a_damaged_file(monkeypatch):
    calibrations_folder().mkdir(parents=True)
    (calibrations_folder() / f"{this_device()}.json").write_text("{")
    monkeypatch.setattr(measuring, "calibrate", lambda hardware: calibration(this_device()))
    assert "calibrated on" in doctor("--calibrate")


def test_a_plan_says_what_its_seconds_come_from():
    words = ["plan", "--model", "qwen3-0.6b", "--gpu", "cpu", "--host-memory", "64GiB"]
    before = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "assumed rates" in " ".join(before.split())
    store_calibration(calibration(this_device()))
    after = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "calibrated on 2026-11-21" in " ".join(after.split())
