"""The best evaluation counts wherever it was made: between two saves, before a resume, in another directory."""

from importlib import import_module
from pathlib import Path

from fitune.checkpoint.commit import read_commit
from runs import (
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
