"""A run that is stopped before an evaluation or in it saves first; the run that goes on makes the evaluation where it
was due, and is then the one that was never stopped."""

from dataclasses import fields
from pathlib import Path

import pytest

from conftest import plan_of
from fitune.checkpoint.commit import read_commit, step_folders
from fitune.models.language_model import LanguageModel
from fitune.values.reports import Restart, StepReport
from runs import contents, report_of, steps_of, trained

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
