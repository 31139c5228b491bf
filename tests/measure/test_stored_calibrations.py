"""Calibrations on disk: what was stored is what is read, and a damaged file says what to do."""

import json
import os
from dataclasses import replace

import pytest

from fitune.errors import HardwareError
from fitune.files import cache_folder
from fitune.measure.hardware import resolve_hardware
from fitune.measure.measurements import (
    calibrations_folder,
    device_key,
    store_calibration,
    stored_calibration,
)
from fitune.values.machines.gpus import cpu_gpu, find_gpu
from fitune.values.machines.hardware import AttentionRate, Calibration, Collectives, Rate, Traffic


def calibration(**different):
    made = Calibration(
        device="rtx-4090",
        date="2026-11-21",
        threads=8,
        products=(Rate(numbers="bf16", flops=150e12, start_seconds=5e-6),),
        attention=(AttentionRate(numbers="bf16", flops=100e12),),
        traffic=(Traffic(tensor_bytes=2**20, bandwidth=900e9), Traffic(tensor_bytes=2**24, bandwidth=600e9)),
        forward_launch_seconds=15e-6,
        backward_launch_seconds=10e-6,
        host_bandwidth=25e9,
        cpu_adam=4e8,
        collectives=Collectives(ranks=2, start_seconds=3e-5, bandwidth=20e9),
    )
    return replace(made, **different)


def test_what_is_stored_is_read_again_and_replaced():
    assert stored_calibration("rtx-4090") is None
    first = store_calibration(calibration())
    assert stored_calibration("rtx-4090") == calibration()
    assert store_calibration(calibration(date="2026-12-01")) == first
    assert stored_calibration("rtx-4090").date == "2026-12-01"
    assert [path.name for path in first.parent.iterdir()] == ["rtx-4090.json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-20].encode(),
        lambda text: text.replace('"date"', '"dat"').encode(),
        lambda text: text.replace("150000000000000.0", "0.0").encode(),
        lambda text: text.replace("900000000000.0", "NaN").encode(),
        lambda text: json.dumps({**json.loads(text), "traffic": []}).encode(),
        lambda text: b"\xff\xfe\x00",
    ],
    ids=["cut off", "misspelled", "zero", "not a number", "nothing", "not text"],
)
def test_a_damaged_file_is_named_with_what_to_do(change):
    path = store_calibration(calibration())
    path.write_bytes(change(path.read_text()))
    with pytest.raises(HardwareError) as refused:
        stored_calibration("rtx-4090")
    assert str(path) in str(refused.value)
    assert "fitune doctor --calibrate" in refused.value.hint


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "file"))
    with pytest.raises(HardwareError, match="cannot be written"):
        store_calibration(calibration())


def test_where_calibrations_are():
    folders = [
        cache_folder(environment)
        for environment in ({"FITUNE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, {"XDG_CACHE_HOME": "/b"}, {})
    ]
    assert list(map(str, folders)) == ["/a", "/b/fitune", os.path.expanduser("~/.cache/fitune")]
    assert calibrations_folder() == cache_folder() / "calibration"


@pytest.mark.parametrize(("wanted", "threads"), [("", 8), ("2", 2), ("4,2", 4), ("many", 8)])
def test_a_processor_is_another_device_with_another_number_of_threads(monkeypatch, wanted, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert device_key(cpu_gpu(memory_bytes=2**34, cores=8), cores=8) == f"cpu-{threads}-threads"
    assert device_key(find_gpu("h100"), cores=8) == "h100"


def test_a_device_that_was_calibrated_here_counts_as_measured():
    assert resolve_hardware(gpu="rtx-4090").rates == "datasheet rates"
    store_calibration(calibration())
    assert resolve_hardware(gpu="RTX 4090").rates == "calibrated on 2026-11-21"
    assert resolve_hardware(gpu="rtx-3090").calibration is None
    here = resolve_hardware(gpu="cpu")
    assert here.rates == "assumed rates"
    store_calibration(calibration(device=device_key(here.gpu, cores=here.cpu_cores)))
    assert resolve_hardware(gpu="cpu").calibration.products[0].flops == 150e12


def test_bandwidth_between_two_measured_sizes():
    found = calibration()
    assert found.bandwidth_for(1) == found.bandwidth_for(2**20) == 900e9
    assert found.bandwidth_for(2**22) == pytest.approx((900e9 * 600e9) ** 0.5)
    assert found.bandwidth_for(2**24) == found.bandwidth_for(2**40) == pytest.approx(600e9)
