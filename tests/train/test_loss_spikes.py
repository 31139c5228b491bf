"""A step whose loss jumps is told with its rows (row 18 of the fault table); the run goes on as it would have."""

import pytest
import torch

from conftest import QUESTIONS
from fitune.models.language_model import LanguageModel
from fitune.train import loop
from fitune.train.loop import LossWatch, StepWatch, row_words
from jsonl import write_lines
from runs import (
    steps_of,
    trained,
)

ODD = 30


@pytest.mark.parametrize(
    ("losses", "jumped"),
    [
        ([2.0] * 8 + [2.4, 2.6], [9]),
        ([2.0] * 7 + [9.0], []),  # too few to hold it against
        ([6.0 - 0.2 * step for step in range(25)], []),
        ([2.0, 3.0] * 6 + [4.5, 9.5], [13]),  # as noisy as ever, then more
        ([2.0] * 10 + [5.0, 2.0, 5.0], [10, 12]),
    ],
)
def test_a_jump_is_far_above_what_is_usual(losses, jumped):
    watch = LossWatch()
    assert [step for step, loss in enumerate(losses) if watch.jumps(loss)] == jumped


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0.0] * 5, [2]),
        ([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], []),
        ([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], [5]),
        ([1e-30] * 4, []),
    ],
)
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_three_zeros_in_a_row_are_told_once(name, values, told):
    watch = StepWatch(0.0)
    words = [
        "".join(watch.warnings(**{"step": at, "loss": 1.0, "grad_norm": 1.0, name: value}))
        for at, value in enumerate(values)
    ]
    assert [at for at, text in enumerate(words) if text] == told
    assert all(name.replace("grad", "gradient").replace("_", " ") in words[at] for at in told)


def test_a_run_whose_gradients_vanish_says_so_before_it_ends(make_plan, monkeypatch):
    """As where kernels of a new device write nothing: every gradient is 0, and the loss stays as it is."""
    monkeypatch.setattr(LanguageModel, "loss_and_gradient", _without_gradient)
    plan = make_plan(tuning="full", gradient_accumulation_steps=1, max_steps=5)
    notes = []
    trained(plan, on_note=notes.append)
    told = [note for note in notes if "exactly 0" in note]
    assert len(told) == 1
    assert told[0].startswith("step 3: the gradient norm was exactly 0 in the last 3 steps")


def _without_gradient(model, hidden_TD, batch, *, scale):
    loss = model.loss(batch)
    for parameter in model.head.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return loss, torch.zeros_like(hidden_TD)


def test_many_rows_are_counted():
    assert row_words(range(23)).endswith("18, 19] and 3 more")


def test_a_row_of_noise_is_named_and_stays(make_plan, tmp_path):
    rows = [*QUESTIONS]
    rows[ODD] = {"question": "?", "answer": "".join(chr(0x4E00 + 37 * place) for place in range(18))}
    data = write_lines(tmp_path / "odd.jsonl", rows)
    plan = make_plan(tuning="full", data=[str(data)], gradient_accumulation_steps=1, max_steps=56)
    notes = []
    report = trained(plan, on_note=notes.append)
    found = [step for step in steps_of(plan) if step.jumped_rows]
    assert found, [round(step.loss, 2) for step in steps_of(plan)]
    assert all(ODD in step.jumped_rows for step in found)
    assert [note for note in notes if note.startswith(f"step {found[0].step}: the loss jumped to ")]
    assert (report.status, report.steps) == ("complete", 56)


def test_gradients_far_above_what_they_are_clipped_to_are_told_once(make_plan):
    """max_grad_norm = 1e-6: every gradient of this model is far above it."""
    notes = []
    plan = make_plan(tuning="full", max_grad_norm=1e-6, gradient_accumulation_steps=1, max_steps=22)
    trained(plan, on_note=notes.append)
    [told] = [note for note in notes if "max_grad_norm" in note]
    assert told.startswith("step 20: the gradient norm was more than 100 × max_grad_norm (1e-06)")


def test_a_run_that_goes_on_remembers_the_steps_before(make_plan, monkeypatch, tmp_path):
    """Every loss is a jump, once there are two to hold it against; every gradient is clipped far too much."""
    monkeypatch.setattr(loop, "_LEAST_STEPS", 2)
    monkeypatch.setattr(loop, "_LEAST_NATS", -9.0)
    monkeypatch.setattr(loop, "_SPREADS", -9e9)
    monkeypatch.setattr(loop, "_FAR_STEPS", 4)
    words = {"tuning": "full", "max_grad_norm": 1e-6, "gradient_accumulation_steps": 1, "max_steps": 6}
    straight, broken = (
        make_plan(output_dir=str(tmp_path / name), **words) for name in ("straight", "broken")
    )
    trained(straight)
    notes = []
    trained(broken, stop_after=3, on_note=notes.append)
    trained(broken, resume=True, on_note=notes.append)
    told = [note.partition(":")[0] for note in notes if "max_grad_norm" in note or "jumped" in note]
    assert told == ["step 3", "step 4", "step 4", "step 5", "step 6"]
    assert [step.jumped_rows for step in steps_of(broken)] == [
        step.jumped_rows for step in steps_of(straight)
    ]


def test_one_step_below_begins_the_count_anew():
    watch, never = StepWatch(1.0), StepWatch(0.0)
    norms = [101.0] * 19 + [100.0] + [101.0] * 20
    assert [at for at, norm in enumerate(norms) if [*watch.warnings(step=at, loss=1.0, grad_norm=norm)]] == [
        39
    ]
    assert not any([*never.warnings(step=at, loss=1.0, grad_norm=1e9)] for at in range(30)), (
        "nothing is clipped"
    )
