"""The engine of a scoring and its devices are chosen by the GPUs that are here; no GPU and no vLLM is needed."""

import json
import os

import pytest

import fitune
from fitune.errors import HardwareError, ModelError, NothingFits
from fitune.measure.nvml import FoundGpu
from fitune.score.plan import ScorePlan
from fitune.session.events import ignore_event
from fitune.session.score.score_plan import plan_scoring, with_fastest_engine
from fitune.units import GIB
from fitune.values.plan import DataSource

ANSWERED = {"prompt": "What is 2 plus 3?", "completion": "5"}
CHOICES = {"question": "What is 2 plus 3?", "choices": ["5", "6"], "answer": 0}


@pytest.fixture
def here(monkeypatch):
    """Lets this machine have some GPUs of 80 GB, and vLLM."""

    def has(*names, vllm=True):
        found = tuple(
            FoundGpu(index=index, uuid=f"GPU-{index}", name=name, memory_bytes=80 * GIB, capability=(8, 0))
            for index, name in enumerate(names)
        )
        monkeypatch.setattr("fitune.measure.hardware.HIDDEN", [])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # what a scoring sets goes with it
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        monkeypatch.setattr("fitune.measure.hardware.gpus_here", lambda: found)
        monkeypatch.setattr("fitune.session.score.score_plan.has_vllm", lambda: vllm)

    return has


def plan_for(folder, row, *, rows, model, graders=()):
    data = folder / "rows.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * rows)
    return ScorePlan(
        model=model, sources=(DataSource(path=str(data)),), output_dir=str(folder / "out"), graders=graders
    )


def choice(plan, engine=None):
    """Engine and devices; None where nothing is chosen, and nothing is said."""
    said = []
    found = with_fastest_engine(plan, engine, emit=said.append)
    assert said or found is plan
    return (found.engine, found.devices) if said else None


@pytest.mark.parametrize(
    ("gpus", "vllm", "engine", "model", "rows", "chosen"),
    [
        (0, True, "vllm", "llama-3.1-8b", 9, None),  # a processor
        (4, False, None, "llama-3.1-8b", 9, None),
        (4, True, "transformers", "llama-3.1-70b", 9, None),  # named: it runs, or says itself why not
        (1, True, "vllm", "llama-3.1-8b", 9, None),  # one device is the default
        (1, True, None, "llama-3.1-8b", 2, ("transformers", 1)),  # vLLM's start alone takes longer
        (8, True, None, "llama-3.1-8b", 5_000, ("vllm", 8)),
        (3, True, "vllm", "llama-3.1-70b", 9, ("vllm", 2)),  # 131 GiB on devices of 80; three do not divide 64 heads
        (2, True, None, "llama-3.1-70b", 9, ("vllm", 2)),
    ],
)  # fmt: skip
def test_the_fastest_engine_that_fits_here_is_chosen(here, tmp_path, gpus, vllm, engine, model, rows, chosen):
    here(*["NVIDIA A100-SXM4-80GB"] * gpus, vllm=vllm)
    assert choice(plan_for(tmp_path, ANSWERED, rows=rows, model=model), engine) == chosen


@pytest.mark.parametrize(
    ("row", "graders"),
    [(CHOICES, ()), (ANSWERED, ("perplexity",)), ({"text": "Two plus three is five."}, ("perplexity",))],
)
def test_what_is_weighed_is_weighed_by_transformers_or_by_as_many_devices_as_hold_the_model(
    here, tmp_path, row, graders
):
    here(*["NVIDIA A100-SXM4-80GB"] * 2)
    plan = plan_for(tmp_path, row, rows=9, model="llama-3.1-70b", graders=graders)
    assert choice(plan) is None
    assert choice(plan, "vllm") == ("vllm", 2)


def test_a_model_that_does_not_fit_the_node_is_refused_with_the_sums(here, tmp_path):
    here("NVIDIA A100-SXM4-80GB")
    plan = plan_for(tmp_path, ANSWERED, rows=9, model="llama-3.1-70b")
    with pytest.raises(NothingFits, match=r"transformers: weights 131\.42(.|\n)*vllm: weights 131\.42"):
        choice(plan)


def test_a_model_that_no_plan_knows_is_scored_without_a_choice(here, tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise ModelError("its state is not known")

    here(*["NVIDIA A100-SXM4-80GB"] * 2)
    monkeypatch.setattr("fitune.session.score.score_plan.plan_answering", unknown)
    assert choice(plan_for(tmp_path, ANSWERED, rows=9, model="llama-3.1-8b"), "vllm") is None


def test_a_plan_for_this_machine_is_for_all_of_its_gpus(here, tmp_path):
    here(*["NVIDIA A100-SXM4-80GB"] * 4)
    plan = plan_for(tmp_path, ANSWERED, rows=9, model="llama-3.1-70b")
    report = plan_scoring(plan, emit=ignore_event)
    assert {each.answering.devices for each in (report.chosen, *report.others)} == {2, 4}
    assert plan_scoring(plan, gpus=2, emit=ignore_event).chosen.answering.devices == 2
    with pytest.raises(HardwareError, match="gpus = 5, but this machine has 4"):
        plan_scoring(plan, gpus=5, emit=ignore_event)


def test_of_gpus_of_two_kinds_a_scoring_sees_one(here, tmp_path, model_folder):
    here("NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", vllm=False)
    plan = plan_for(tmp_path, ANSWERED, rows=2, model=str(model_folder))
    report = fitune.score(plan.model, plan.sources[0].path, plan.output_dir, max_new_tokens=2)
    assert report.answered == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-0"
