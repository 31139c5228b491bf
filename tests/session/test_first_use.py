"""A processor is measured before its first training, once, and only where nobody forbids it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fitune.measure import device_rates
from fitune.measure.calibrations import calibrations_folder, device_key, quick_key
from fitune.measure.hardware import calibrated, detect_hardware
from fitune.session.train.first_use import measure_on_first_use


def test_the_first_training_measures_and_the_second_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "NEW_BYTES", 2**20)
    monkeypatch.setattr(device_rates, "ADAM_PARAMETERS", 2**16)
    little = replace(
        device_rates.HURRIED, products=1, row_lengths=(64,), tensor_mib=(0.25,), pool_bytes=2**20
    )
    monkeypatch.setattr(device_rates, "HURRIED", little)
    here = detect_hardware(use_gpus=False)
    said: list[str] = []
    before = torch.get_rng_state()
    assert measure_on_first_use(here, tell=lambda event: said.append(str(event)), environment={})
    assert torch.equal(before, torch.get_rng_state())
    assert "measured this processor in" in said[0]
    again = calibrated(here)
    assert again.calibration is not None
    assert again.calibration.device == quick_key(device_key(here.gpu, cores=here.cpu_cores))
    assert not measure_on_first_use(again, tell=lambda event: said.append(str(event)), environment={})
    assert len(said) == 1


def test_it_can_be_switched_off_and_is_for_one_process_on_a_processor() -> None:
    here = detect_hardware(use_gpus=False)
    for hardware, environment in (
        (here, {"FITUNE_CALIBRATE": "0"}),
        (replace(here, gpus_per_node=2), {}),
        (replace(here, gpu=replace(here.gpu, name="h100", capability=(9, 0))), {}),
    ):
        assert not measure_on_first_use(hardware, tell=print, environment=environment)
    assert not calibrations_folder().exists()


def test_another_processor_has_another_name(tmp_path: Path) -> None:
    names = []
    for kind in ("EPYC 9354", "Xeon 8480"):
        file = tmp_path / kind
        file.write_text(f"processor : 0\nmodel name : {kind}\n")
        names.append(quick_key("cpu-2-threads", cpuinfo=file))
    assert names[0] != names[1]
    assert all(name.startswith("cpu-2-threads-") and name.endswith("-quick") for name in names)
    assert quick_key("cpu-2-threads", cpuinfo=tmp_path / "none").endswith("-quick")
