"""A processor is measured before its first training, once, and only where nobody forbids it."""

from dataclasses import replace

import pytest
import torch

from fitune.errors import FituneError
from fitune.measure import device_rates
from fitune.measure.hardware import calibrated, detect_hardware
from fitune.measure.measurements import calibrations_folder, device_key, quick_key
from fitune.recipe.recipe import parse_recipe
from fitune.score.engines.engine import Sampling
from fitune.score.plan import ScorePlan
from fitune.session.doctor import measure_on_first_use
from fitune.session.score.score_plan import plan_scoring
from fitune.session.train.beginning import first_attempt
from fitune.values.plan import DataSource


@pytest.fixture
def little(monkeypatch):
    """Less is measured than of use, in less time."""
    monkeypatch.setattr(device_rates, "NEW_BYTES", 2**20)
    monkeypatch.setattr(device_rates, "ADAM_PARAMETERS", 2**16)
    effort = replace(
        device_rates.HURRIED, products=1, row_lengths=(64,), tensor_mib=(0.25,), pool_bytes=2**20
    )
    monkeypatch.setattr(device_rates, "HURRIED", effort)


@pytest.mark.usefixtures("little")
def test_the_first_training_measures_and_the_second_does_not():
    here, said = detect_hardware(use_gpus=False), []
    before = torch.get_rng_state()
    assert measure_on_first_use(here, emit=said.append, environment={})
    assert torch.equal(before, torch.get_rng_state())
    again = calibrated(here)
    assert again.calibration.device == quick_key(device_key(here.gpu, cores=here.cpu_cores))
    assert not measure_on_first_use(again, emit=said.append, environment={})
    assert ["measured this processor in" in str(event) for event in said] == [True]


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    "wrong",
    [{"tuning": "full", "dora": True}, {"data": "nowhere.jsonl"}, {"global_batch_size": 7, "gpus": 2}],
)
def test_what_is_wrong_is_refused_before_the_processor_is_measured(monkeypatch, settings, wrong):
    monkeypatch.delenv("FITUNE_CALIBRATE")
    said = []
    with pytest.raises(FituneError):
        first_attempt(parse_recipe(settings | wrong), overwrite=False, emit=said.append)
    assert said == []


@pytest.mark.usefixtures("little")
def test_the_first_plan_of_a_scoring_measures_and_the_second_uses_it(monkeypatch, model_folder, data_file):
    monkeypatch.delenv("FITUNE_CALIBRATE")
    asked = ScorePlan(
        model=str(model_folder), sources=(DataSource(path=str(data_file)),), output_dir="",
        sampling=Sampling(max_new_tokens=8),
    )  # fmt: skip
    said = []
    first, second, elsewhere = (
        plan_scoring(asked, engine="transformers", gpu=gpu, emit=said.append).chosen.answering.hardware
        for gpu in ("", "", "h100")
    )
    assert ["measured this processor in" in str(event) for event in said] == [True]
    assert first.calibration == second.calibration != elsewhere.calibration is None


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_two_processes_are_measured_while_both_work(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone, said = replace(detect_hardware(use_gpus=False), cpu_cores=2), []
    two = replace(alone, gpus_per_node=2)
    assert measure_on_first_use(two, emit=said.append, environment={})
    assert "measured this processor by 2 processes in" in str(said[0])
    found = calibrated(two).calibration
    assert found.device.startswith("cpu-1-threads-2-processes-")
    assert (found.threads, found.collectives.ranks) == (1, 2)
    assert calibrated(alone).calibration is None


@pytest.mark.slow
def test_processes_that_cannot_measure_are_said_and_stop_nothing(monkeypatch):
    monkeypatch.setattr(device_rates, "HURRIED", replace(device_rates.HURRIED, rounds=0))
    two, said = replace(detect_hardware(use_gpus=False), gpus_per_node=2), []
    assert not measure_on_first_use(two, emit=said.append, environment={})
    assert "were not measured: a process that measures this processor ended with" in str(said[0])
    assert not calibrations_folder().exists()


def test_it_can_be_switched_off_and_is_for_the_processors_of_one_machine():
    here = detect_hardware(use_gpus=False)
    for hardware, environment in (
        (here, {"FITUNE_CALIBRATE": "0"}),
        (replace(here, nodes=2), {}),
        (replace(here, gpu=replace(here.gpu, name="h100", capability=(9, 0))), {}),
    ):
        assert not measure_on_first_use(hardware, emit=print, environment=environment)
    assert not calibrations_folder().exists()


def test_another_processor_has_another_name(tmp_path):
    names = []
    for kind in ("EPYC 9354", "Xeon 8480"):
        file = tmp_path / kind
        file.write_text(f"processor : 0\nmodel name : {kind}\n")
        names.append(quick_key("cpu-2-threads", cpuinfo=file))
    names.append(quick_key("cpu-2-threads", cpuinfo=tmp_path / "none"))
    assert len(set(names)) == 3
    assert all(name.startswith("cpu-2-threads-") and name.endswith("-quick") for name in names)
