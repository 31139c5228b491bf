"""Memory of a run is that of its heaviest micro-batch, wherever that is and whatever makes it heavy."""

import sys

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


def loader_of(plan, *, heaviest):
    """One row a step, all of 8 tokens but that of step ``heaviest`` (0-based), which has 64."""

    def made(lengths):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.arange(offsets[-1], dtype=np.int32) % 300
        return Loader(TokenDataset(ids, np.ones(len(ids), np.bool_), offsets), plan.batch, seed=plan.run.seed)

    row = int(made([8] * ROWS)._order(0)[heaviest])
    return made([64 if number == row else 8 for number in range(ROWS)])


def only(plan):
    return PlanReport(
        chosen=Priced(plan=plan, estimate=predict(plan)), runners_up=(), rejected=(), decisions=()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize(("heaviest", "steps"), [(0, 5), (3, 5), (0, 1)])
def test_the_heaviest_step_is_predicted_and_measured_also_when_it_is_the_first(
    make_plan, tuning, precision, heaviest, steps
):
    plan = make_plan(
        tuning=tuning, precision=precision, micro_batch_size=1, gradient_accumulation_steps=1, packing=False,
        seq_len=64, max_steps=steps, gradient_checkpointing=False, learning_rate=1e-3,
    )  # fmt: skip
    loader = loader_of(plan, heaviest=heaviest)
    said = predict_run(only(plan), loader, after=0)
    if tuning == "lora" or heaviest:  # else the peak is in an update, with states, of any later step
        assert (said.heaviest_step, said.heaviest_tokens) == (heaviest + 1, 64)

    torch.manual_seed(0)
    measured = {}
    for step in train(plan, prepare(plan), loader, meter=CpuMeter()):
        for phase, size in step.memory_bytes.items():
            measured[phase] = max(measured.get(phase, 0), size)
    # the first update makes states one by one: not all of them are there beside its temporaries
    share = 0.03 if steps > 1 else 0.04
    for phase, terms in said.estimate.memory.phases.items():
        assert sum(terms.values()) == pytest.approx(measured[phase], rel=share), phase


@pytest.mark.parametrize(("heaviest", "start", "measured"), [
    (0, 0, {0, 1}), (3, 0, {1, 3}), (1, 0, {1}), (2, 2, {2, 3}), (0, 2, {3}), (4, 4, {4}), (0, 5, set()),
])  # fmt: skip
def test_the_first_step_of_a_process_is_measured_where_it_is_the_heaviest(
    make_plan, heaviest, start, measured
):
    plan = make_plan(
        micro_batch_size=1, gradient_accumulation_steps=1, packing=False, seq_len=64, max_steps=5
    )
    assert steps_to_measure(loader_of(plan, heaviest=heaviest), start_step=start, total=5) == measured


def test_a_run_that_has_no_steps_left_is_predicted_by_its_last(make_plan):
    plan = make_plan(micro_batch_size=1, gradient_accumulation_steps=1, packing=False, max_steps=5)
    assert predict_run(only(plan), loader_of(plan, heaviest=3), after=5).heaviest_step == 5


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


def peaks_of(plan, loader, monkeypatch, *, all_steps):
    """Measured bytes by phase, of all steps or of those that a run measures."""
    with monkeypatch.context() as patch:
        if all_steps:
            patch.setattr(
                sys.modules["fitune.train.loop"],
                "steps_to_measure",
                lambda *_, total, **__: set(range(total)),
            )
        torch.manual_seed(0)
        measured = {}
        for step in train(plan, prepare(plan), loader, meter=CpuMeter()):
            for phase, size in step.memory_bytes.items():
                measured[phase] = max(measured.get(phase, 0), size)
    return measured


CASES = {
    "most labels": ({"loss": "plain"}, [(8, 7), (64, 1), (8, 7), (60, 59), (8, 7)]),
    "many labels and many tokens": (
        {"loss": "plain"}, [(8, 7), (64, 1), (8, 7), (61, 50), (40, 39), (8, 7)],
    ),
    "first of its step": (
        {"tuning": "full", "gradient_accumulation_steps": 2},
        [(8, 7), (8, 7), (64, 63), (8, 7), (8, 7), (24, 23), (8, 7), (8, 7)],
    ),
    "fewer rows than a step": ({"tuning": "full", "gradient_accumulation_steps": 3}, [(64, 63)]),
}  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_predicted_and_measured_peak_are_the_highest_of_the_run(make_plan, monkeypatch, case, recompute):
    settings, rows = CASES[case]
    plan = make_plan(**{
        "tuning": "lora", "micro_batch_size": 1, "gradient_accumulation_steps": 1, "packing": False,
        "seq_len": 64, "max_steps": 5, "gradient_checkpointing": recompute, "learning_rate": 1e-3, **settings,
    })  # fmt: skip
    loader = loader_of_rows(plan, rows)
    said = predict_run(only(plan), loader, after=0).estimate.memory
    highest = peaks_of(plan, loader, monkeypatch, all_steps=True)
    measured = peaks_of(plan, loader, monkeypatch, all_steps=False)
    assert max(measured.values()) == max(highest.values())
    assert said.tensor_peak_bytes == pytest.approx(max(highest.values()), rel=0.01)
