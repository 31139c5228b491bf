"""A whole run in one process: it learns, it stops and goes on as if it had not, it never lies about a bad end."""

import shutil
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from conftest import plan_of
from fitune.errors import RunDirectoryError, StoreError, installed_versions
from fitune.train.loop import wait_for
from fitune.train.prepare import prepare
from fitune.train.run import run
from fitune.values.plan import Epochs
from fitune.values.predictions import Phase
from runs import callbacks, contents, losses, report_of, steps_of, trained, written_plan


@pytest.fixture(scope="module")
def whole(model_folder, data_file, tmp_path_factory):
    """(plan, report) of a complete run of two epochs with held-out rows and samples."""
    words = {"tuning": "full", "packing": False, "val_fraction": 0.1, "samples": 3, "max_steps": 14}
    plan = plan_of(model_folder, data_file, tmp_path_factory.mktemp("whole") / "run", **words)
    said = iter(["before"] * 3 + ["after"] * 3)
    answering = callbacks(answer=lambda model, conversations: [next(said) for _ in conversations])
    return plan, run(plan, callbacks=answering, files={"recipe.yaml": "model: x\n"})


def test_training_learns(whole):
    _, report = whole
    assert report.status == "complete"
    assert report.final_loss < 0.8 * report.first_loss
    assert report.best_eval_loss < report.first_loss
    assert report.eval_loss == report.best_eval_loss < report.eval_loss_before
    assert (Path(report.exported) / "README.md").is_file()


def test_with_save_steps_0_nothing_is_saved(whole):
    plan, _ = whole
    assert not (Path(plan.run.output_dir) / "checkpoints").exists()


def test_every_figure_of_the_report_comes_from_the_log(whole):
    plan, report = whole
    steps = steps_of(plan)
    assert report.tokens == sum(step.tokens for step in steps)
    assert report.supervised_tokens == sum(step.supervised_tokens for step in steps)
    assert (report.first_loss, report.final_loss) == (steps[0].loss, steps[-1].loss)
    assert report_of(plan) == report


def test_the_second_step_is_measured_by_phase(whole):
    """And the heaviest one of those that follow the first, in which there are no states yet."""
    plan, report = whole
    steps = steps_of(plan)
    heaviest = max(steps[1:], key=lambda step: step.tokens)
    assert [step.step for step in steps if step.memory_bytes] == [2, heaviest.step]
    assert report.memory is not None
    assert set(report.memory.phases) == set(Phase)
    assert report.memory.phases[Phase.IDLE] < report.memory.peak_bytes


def test_samples_show_answers_before_and_after(whole):
    _, report = whole
    assert [(s.before, s.after) for s in report.samples] == [("before", "after")] * 3
    assert all(s.prompt.startswith("What is") for s in report.samples)


def test_plan_json_is_the_plan_that_ran(whole):
    plan, _ = whole
    assert written_plan(plan) == plan
    assert (Path(plan.run.output_dir) / "recipe.yaml").read_text() == "model: x\n"


def test_the_held_out_loss_before_training_is_that_of_the_model_as_it_was(make_plan):
    report = trained(make_plan(learning_rate=1e-30, max_steps=1, val_fraction=0.2))
    assert report.eval_loss_before == report.eval_loss


def test_the_same_rows_otherwise_cut_recomputed_and_chunked_give_the_same_losses(make_plan, tmp_path):
    """Famous bug: accumulation normalised per micro-batch instead of per supervised token."""
    base, frugal = (
        make_plan(
            tuning="full", max_steps=3, micro_batch_size=micro, gradient_accumulation_steps=8 // micro,
            gradient_checkpointing=micro == 1, output_dir=str(tmp_path / f"micro-{micro}"), **loss,
        )
        for micro, loss in ((8, {"loss": "plain"}), (1, {"loss": "chunked", "loss_chunk_tokens": 16}))
    )  # fmt: skip
    trained(base)
    trained(frugal)
    assert losses(frugal) == pytest.approx(losses(base), rel=2e-5)


def test_a_steps_seconds_end_when_the_device_is_through(make_plan, monkeypatch):
    """The optimizer's kernels are launched, and done later; none of its time is the next step's."""
    monkeypatch.setattr(sys.modules["fitune.train.loop"], "wait_for", lambda device: time.sleep(0.3))
    plan = make_plan(max_steps=2)
    trained(plan)
    assert all(step.step_seconds >= 0.3 for step in steps_of(plan))


def test_a_step_waits_for_its_own_card_alone(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in ("cpu", "cuda:1"):
        wait_for(torch.device(device))
    assert waited == [torch.device("cuda:1")]


def test_fp32_products_are_exact_unless_the_plan_has_tf32(make_plan, monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    plan = make_plan(max_steps=1)
    for tf32 in (False, True):
        prepare(replace(plan, tf32=tf32))
    assert set_to == ["highest", "high"]


def test_a_fitune_that_is_not_installed_has_no_version_and_runs(whole):
    _, report = whole
    assert installed_versions(("of nobody", "torch")).keys() == {"python", "torch"}
    assert {"python", "torch", "transformers", "peft"} <= report.versions.keys()


def test_an_earlier_run_is_not_overwritten_unasked(whole, tmp_path):
    plan, _ = whole
    copied = shutil.copytree(plan.run.output_dir, tmp_path / "run")
    plan = replace(plan, run=replace(plan.run, output_dir=str(copied)))
    before = contents(Path(plan.run.output_dir))
    with pytest.raises(RunDirectoryError, match="earlier run"):
        trained(plan)
    assert contents(Path(plan.run.output_dir)) == before


def test_epochs_count_rows(make_plan):
    """56 rows, 8 a step: 7 steps an epoch."""
    plan = make_plan()
    plan = replace(plan, schedule=replace(plan.schedule, duration=Epochs(count=1.5)))
    report = trained(plan)
    assert report.total_steps == 11
    assert report.eval_loss_before is None
    assert steps_of(plan)[6].epoch == pytest.approx(1.0)


def test_a_run_that_its_store_refuses_leaves_nothing(make_plan, tmp_path, monkeypatch):
    """A bucket may take the probe of a few bytes and nothing larger."""

    def refuse(*words, **named):
        raise StoreError("s3://bucket/run: too large")

    monkeypatch.setattr(import_module("fitune.train.run"), "begin_in_store", refuse)
    with pytest.raises(StoreError):
        trained(make_plan(output_dir=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
