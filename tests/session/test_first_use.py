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
    here = detect_hardware(use_gpus=False)
    said = []
    before = torch.get_rng_state()
    assert measure_on_first_use(here, emit=lambda event: said.append(str(event)), environment={})
    assert torch.equal(before, torch.get_rng_state())
    assert "measured this processor in" in said[0]
    again = calibrated(here)
    assert again.calibration is not None
    assert again.calibration.device == quick_key(device_key(here.gpu, cores=here.cpu_cores))
    assert not measure_on_first_use(again, emit=lambda event: said.append(str(event)), environment={})
    assert len(said) == 1


@pytest.mark.usefixtures("little")
@pytest.mark.parametrize(
    "wrong",
    [{"tuning": "full", "dora": True}, {"data": "nowhere.jsonl"}, {"global_batch_size": 7, "gpus": 2}],
)
def test_what_is_wrong_is_refused_before_the_processor_is_measured(
    monkeypatch, model_folder, tmp_path, wrong
):
    monkeypatch.delenv("FITUNE_CALIBRATE")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "How many?", "completion": "Two."}\n')
    given = {"model": str(model_folder), "data": str(rows), "output_dir": str(tmp_path / "run"), "gpu": "cpu"}
    said = []
    with pytest.raises(FituneError):
        first_attempt(
            parse_recipe(given | wrong), overwrite=False, emit=lambda event: said.append(str(event))
        )
    assert said == []


@pytest.mark.usefixtures("little")
def test_the_first_plan_of_a_scoring_measures_and_the_second_uses_it(monkeypatch, model_folder, tmp_path):
    monkeypatch.delenv("FITUNE_CALIBRATE")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "How many?", "completion": "Two."}\n')
    source = DataSource(path=str(rows))
    asked = ScorePlan(
        model=str(model_folder), sources=(source,), output_dir="", sampling=Sampling(max_new_tokens=8)
    )
    said = []

    def plan(gpu=""):
        return plan_scoring(asked, engine="transformers", gpu=gpu, emit=lambda event: said.append(str(event)))

    plans = [plan() for _ in range(2)]
    assert "measured this processor in" in said[0]
    assert len(said) == 1
    first, second = (plan.chosen.answering.hardware.calibration for plan in plans)
    assert first is not None
    assert first == second
    assert plan(gpu="h100").chosen.answering.hardware.calibration is None


@pytest.mark.slow
@pytest.mark.usefixtures("little")
def test_two_processes_are_measured_while_both_work(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone = replace(detect_hardware(use_gpus=False), cpu_cores=2)
    two = replace(alone, gpus_per_node=2)
    said = []
    assert measure_on_first_use(two, emit=lambda event: said.append(str(event)), environment={})
    assert "measured this processor by 2 processes in" in said[0]
    found = calibrated(two).calibration
    assert found is not None
    assert found.device.startswith("cpu-1-threads-2-processes-")
    assert found.threads == 1
    assert found.collectives is not None
    assert found.collectives.ranks == 2
    assert calibrated(alone).calibration is None


@pytest.mark.slow
def test_processes_that_cannot_measure_are_said_and_stop_nothing(monkeypatch):
    monkeypatch.setattr(device_rates, "HURRIED", replace(device_rates.HURRIED, rounds=0))
    two = replace(detect_hardware(use_gpus=False), gpus_per_node=2)
    said = []
    assert not measure_on_first_use(two, emit=lambda event: said.append(str(event)), environment={})
    assert "were not measured: a process that measures this processor ended with" in said[0]
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
    assert names[0] != names[1]
    assert all(name.startswith("cpu-2-threads-") and name.endswith("-quick") for name in names)
    assert quick_key("cpu-2-threads", cpuinfo=tmp_path / "none").endswith("-quick")
