"""Memory of a run is that of its heaviest micro-batch, wherever that is and whatever makes it heavy."""

import sys
from functools import partial

import numpy as np
import pytest
import torch

from fitune.data.dataset import TokenDataset
from fitune.data.loader import Loader
from fitune.estimate.predict import predict
from fitune.measure.memory import CpuMeter
from fitune.session.train.training import predict_run
from fitune.train.loop import steps_to_measure, train
from fitune.train.prepare import prepare
from fitune.values.predictions import PlanReport, Priced

ROWS = 12


@pytest.fixture
def plan_of_rows(make_plan):
    """Plans whose steps take a row each."""
    return partial(
        make_plan, micro_batch_size=1, gradient_accumulation_steps=1, packing=False, seq_len=64, max_steps=5,
        gradient_checkpointing=False, learning_rate=1e-3,
    )  # fmt: skip


def only(plan):
    return PlanReport(
        chosen=Priced(plan=plan, estimate=predict(plan)), runners_up=(), rejected=(), decisions=()
    )


@pytest.mark.parametrize(("tuning", "precision"), [("full", "bf16-master"), ("lora", "fp32")])
@pytest.mark.parametrize(("heaviest", "steps"), [(0, 5), (3, 5), (0, 1)])
def test_the_heaviest_step_is_predicted_and_measured_also_when_it_is_the_first(
    plan_of_rows, tuning, precision, heaviest, steps
):
    plan = plan_of_rows(tuning=tuning, precision=precision, max_steps=steps)
    loader = loader_of_heaviest(plan, heaviest)
    said = predict_run(only(plan), loader, after=0)
    if tuning == "lora" or heaviest:  # else the peak is in an update, with states, of any later step
        assert (said.heaviest_step, said.heaviest_tokens) == (heaviest + 1, 64)
    measured = peaks_of(plan, loader)
    # the first update makes states one by one: not all of them are there beside its temporaries
    share = 0.03 if steps > 1 else 0.04
    for phase, terms in said.estimate.memory.phases.items():
        assert sum(terms.values()) == pytest.approx(measured[phase], rel=share), phase


@pytest.mark.parametrize(("heaviest", "start", "measured"), [
    (0, 0, {0, 1}), (3, 0, {1, 3}), (1, 0, {1}), (2, 2, {2, 3}), (0, 2, {3}), (4, 4, {4}), (0, 5, set()),
])  # fmt: skip
def test_the_first_step_of_a_process_is_measured_where_it_is_the_heaviest(
    plan_of_rows, heaviest, start, measured
):
    loader = loader_of_heaviest(plan_of_rows(), heaviest)
    assert steps_to_measure(loader, start_step=start, total=5) == measured


def test_a_run_that_has_no_steps_left_is_predicted_by_its_last(plan_of_rows):
    plan = plan_of_rows()
    assert predict_run(only(plan), loader_of_heaviest(plan, 3), after=5).heaviest_step == 5


def loader_of_rows(plan, rows):
    """One row of (tokens, labels at its end) for each step, or micro-batch, in this order."""
    placed = dict(
        zip(np.random.default_rng([plan.run.seed, 0]).permutation(len(rows)).tolist(), rows, strict=True)
    )
    lengths = [placed[number][0] for number in range(len(rows))]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    learned = [
        np.arange(tokens) >= tokens - labels for tokens, labels in (placed[n] for n in range(len(rows)))
    ]
    ids = np.arange(offsets[-1], dtype=np.int32) % 300
    return Loader(TokenDataset(ids, np.concatenate(learned), offsets), plan.batch, seed=plan.run.seed)


def loader_of_heaviest(plan, heaviest):
    """One row a step, all of 8 tokens but that of step ``heaviest`` (0-based), which has 64."""
    return loader_of_rows(plan, [(64, 64) if step == heaviest else (8, 8) for step in range(ROWS)])


def peaks_of(plan, loader):
    """Bytes by phase as a run measures them."""
    torch.manual_seed(0)
    measured = {}
    for step in train(plan, prepare(plan), loader, meter=CpuMeter()):
        for phase, size in step.memory_bytes.items():
            measured[phase] = max(measured.get(phase, 0), size)
    return measured


CASES = {
    "most labels": ({"loss": "plain"}, [(8, 7), (64, 1), (8, 7), (60, 59), (8, 7)]),
    "many labels and many tokens": (
        {"loss": "plain", "gradient_checkpointing": True},
        [(8, 7), (64, 1), (8, 7), (61, 50), (40, 39), (8, 7)],
    ),
    "first of its step": (
        {"tuning": "full", "gradient_accumulation_steps": 2},
        [(8, 7), (8, 7), (64, 63), (8, 7), (8, 7), (24, 23), (8, 7), (8, 7)],
    ),
    "fewer rows than a step": (
        {"tuning": "full", "gradient_accumulation_steps": 3, "gradient_checkpointing": True},
        [(64, 63)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_predicted_and_measured_peak_are_the_highest_of_the_run(plan_of_rows, monkeypatch, case):
    settings, rows = CASES[case]
    plan = plan_of_rows(**settings)
    loader = loader_of_rows(plan, rows)
    said = predict_run(only(plan), loader, after=0).estimate.memory
    measured = peaks_of(plan, loader)
    monkeypatch.setattr(
        sys.modules["fitune.train.loop"], "steps_to_measure", lambda *_, total, **__: set(range(total))
    )
    highest = max(peaks_of(plan, loader).values())
    assert max(measured.values()) == highest
    assert said.tensor_peak_bytes == pytest.approx(highest, rel=0.01)
