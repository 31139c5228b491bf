"""Evaluations of a run: the best counts wherever it was made, between two saves, before a resume, in another directory.

A run that is stopped before one or in it saves first; the run that goes on makes it where it was due, and is then the
one that was never stopped.
"""

from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from conftest import plan_of
from fitune.checkpoint.commit import read_commit, step_folders
from fitune.models.language_model import LanguageModel
from fitune.values.reports import Restart, StepReport
from runs import (
    contents,
    report_of,
    steps_of,
    trained,
)


def evaluating(monkeypatch, *losses):
    """``losses`` in their order, after that of the untrained model."""
    said = iter((9.0, *losses))
    monkeypatch.setattr(
        import_module("fitune.train.held_out"), "evaluate", lambda model, dataset, batch, **others: next(said)
    )


def test_the_best_checkpoint_is_of_the_best_evaluation_even_between_two_saves(make_plan, monkeypatch):
    evaluating(monkeypatch, 3.0, 1.0, 2.0, 4.0)
    plan = make_plan(max_steps=8, eval_steps=2, save_steps=3, val_fraction=0.2)
    report = trained(plan)
    best = Path(plan.run.output_dir) / "checkpoints" / "best"
    assert best.resolve().name == "step-4"
    assert read_commit(best).eval_loss == 1.0
    assert report.best_eval_loss == 1.0


def test_a_recipe_that_says_nothing_saves_every_epoch(make_plan):
    plan = make_plan(max_steps=15, save_steps=None, keep_checkpoints=5)
    assert (plan.run.save_every, plan.run.saves_per_epoch) == (0, 1)
    trained(plan)
    saved = sorted(p.name for p in (Path(plan.run.output_dir) / "checkpoints").glob("step-*"))
    assert saved == ["step-14", "step-15", "step-7"], "56 rows are 7 steps of 8, and the end is saved too"


def test_a_resumed_run_remembers_the_best_of_before(make_plan, monkeypatch, tmp_path):
    """In another directory, too: the checkpoint says it and brings the lines of metrics along."""
    evaluating(monkeypatch, 0.5, 0.75, 0.9)
    settings = {"max_steps": 6, "eval_steps": 2, "save_steps": 3, "val_fraction": 0.2}
    first, second = (make_plan(**settings, output_dir=str(tmp_path / name)) for name in ("first", "second"))
    trained(first, stop_after=4)
    report = trained(second, resume=str(tmp_path / "first" / "checkpoints" / "step-4"))
    assert [step.step for step in steps_of(second)] == [1, 2, 3, 4, 5, 6]
    assert (report.eval_loss_before, report.best_eval_loss, report.eval_loss) == (9.0, 0.5, 0.9)
    assert [step.eval_loss_before for step in steps_of(second)] == [9.0, None, None, None, None, None]


SETTINGS = {
    "max_steps": 4, "eval_steps": 2, "save_steps": 3, "val_fraction": 0.2, "keep_checkpoints": 1, "lora_dropout": 0.1,
}  # fmt: skip
"""A run that is asked to stop eight times: after each step, and before each of the two batches of an evaluation."""


def lasting(plan):
    """The lines of metrics.jsonl but what is measured of a process: seconds and bytes."""
    measured = {
        field.name for field in fields(StepReport)
        if field.name.endswith(("_seconds", "_per_second")) or field.name in ("mfu", "memory_bytes")
    }  # fmt: skip
    return [
        {f.name: getattr(step, f.name) for f in fields(StepReport) if f.name not in measured}
        for step in steps_of(plan)
    ]


def kept(plan):
    """The checkpoints with their losses, and the best of them."""
    folder = Path(plan.run.output_dir) / "checkpoints"
    losses = {path.name: read_commit(path).eval_loss for path in step_folders(folder)}
    return losses, (folder / "best").resolve().name


def require_same(straight, broken):
    assert lasting(broken) == lasting(straight)
    assert kept(broken) == kept(straight)
    one, other = report_of(straight), report_of(broken)
    for name in ("status", "steps", "eval_loss_before", "eval_loss", "best_eval_loss", "final_loss"):
        assert getattr(one, name) == getattr(other, name), name


@pytest.fixture(scope="module")
def straight(model_folder, data_file, tmp_path_factory):
    """The run that is never stopped."""
    plan = plan_of(model_folder, data_file, tmp_path_factory.mktemp("straight") / "run", **SETTINGS)
    trained(plan)
    return plan


@pytest.fixture
def broken(make_plan, tmp_path):
    return make_plan(**SETTINGS, output_dir=str(tmp_path / "broken"))


@pytest.mark.parametrize(
    ("ask", "step"),
    [(2, 2), (3, 2), (6, 4), (7, 4)],
    ids=["before one", "in one", "before the last", "in the last"],
)
def test_a_run_that_is_stopped_at_an_evaluation_saves_first_and_makes_it_when_it_goes_on(
    straight, broken, ask, step
):
    report = trained(broken, stop_after=ask)
    assert (report.status, report.steps) == ("interrupted", step)
    assert steps_of(broken)[-1].eval_loss is None
    assert kept(broken)[0][f"step-{step}"] is None
    assert trained(broken, resume=True).status == "complete"
    require_same(straight, broken)


def test_an_evaluation_that_is_stopped_again_stays_owed(straight, broken):
    for _ in range(2):
        report = trained(broken, stop_after=2, resume=True)
        assert (report.status, report.steps, report.eval_loss) == ("interrupted", 2, None)
    trained(broken, resume=True)
    require_same(straight, broken)


def test_it_is_made_where_the_run_goes_on_in_another_directory(straight, broken, make_plan, tmp_path):
    first = make_plan(**SETTINGS, output_dir=str(tmp_path / "first"))
    trained(first, stop_after=2)
    saved = Path(first.run.output_dir) / "checkpoints/step-2"
    before = contents(saved)
    assert trained(broken, stop_after=1, resume=str(saved)).steps == 2
    assert contents(saved) == before
    trained(broken, resume=True)
    require_same(straight, broken)


def test_a_kill_after_an_owed_evaluation_leaves_no_word_of_changed_lines(straight, broken, monkeypatch):
    """The log has the loss, and the checkpoint's copy of it has not."""
    trained(broken, stop_after=3)
    with monkeypatch.context() as patched:
        patched.setattr(LanguageModel, "loss_and_gradient", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(broken, resume=True)
    assert steps_of(broken)[-1].eval_loss is not None
    notes = []
    trained(broken, resume=True, on_note=notes.append)
    assert not [note for note in notes if "metrics.jsonl" in note]
    require_same(straight, broken)


def killed(*_words, **_named):
    raise KeyboardInterrupt


def test_a_step_that_owes_nothing_is_not_evaluated_under_settings_that_come_later(make_plan):
    plan, settings = make_plan(val_fraction=0.2, save_steps=2), {"val_fraction": 0.2, "save_steps": 2}
    trained(plan, stop_after=2)
    trained(make_plan(**settings, eval_steps=2), resume=True)
    assert [step.step for step in steps_of(plan) if step.eval_loss is not None] == [4, 6]


def test_ranks_that_only_make_an_evaluation_are_told_of_in_the_report(broken):
    trained(broken, stop_after=6)  # before the evaluation of the last step
    lost = Restart(
        cause="a worker was lost", workers_before=2, workers=1, after_step=4, lost_steps=0, lost_at=1.0,
        repeated_seconds=0.0,
    )  # fmt: skip
    (told,) = trained(broken, resume=True, restarts=(lost,)).restarts
    assert told.cause == lost.cause
    assert told.lost_seconds > 0
