"""A whole run in one process: it learns, it stops and goes on as if it had not, it never lies about a bad end."""

import importlib.metadata
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from fitune.errors import RunDirectoryError, StoreError, TrainingFailed
from fitune.train.loop import wait_for
from fitune.train.prepare import prepare
from fitune.train.run import run
from fitune.values.plan import Epochs
from fitune.values.predictions import Phase
from runs import callbacks, losses, report_of, steps_of, stopped_and_resumed, trained, written_plan


@pytest.mark.parametrize(("tuning", "packing", "share"), [("lora", True, 0.95), ("full", False, 0.6)])
def test_training_learns(make_plan, tuning, packing, share):
    """Adapters on a random frozen base cannot learn much; all weights can."""
    plan = make_plan(tuning=tuning, max_steps=25, packing=packing, val_fraction=0.1)
    report = trained(plan)
    assert report.status == "complete"
    assert report.final_loss < share * report.first_loss
    assert report.best_eval_loss is not None
    assert report.best_eval_loss < report.first_loss
    assert report.eval_loss == report.best_eval_loss < report.eval_loss_before
    assert (Path(report.exported) / "README.md").is_file()


def test_the_held_out_loss_before_training_is_that_of_the_model_as_it_was(make_plan):
    report = trained(make_plan(learning_rate=1e-30, max_steps=1, val_fraction=0.2))
    assert report.eval_loss_before == report.eval_loss
    assert trained(make_plan(max_steps=1), overwrite=True).eval_loss_before is None


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_dropout": 0.1},
        pytest.param({"tuning": "full"}, marks=pytest.mark.slow),
        {"tuning": "full", "precision": "bf16-master"},
        {"packing": True, "micro_batch_size": 1, "seq_len": 100, "lora_dropout": 0.1},
    ],
)
def test_a_run_that_was_interrupted_mid_epoch_ends_bit_for_bit_the_same(make_plan, tmp_path, settings):
    common = {"max_steps": 9, "save_steps": 4, "optimizer": "adamw", **settings}
    stopped_and_resumed(
        *(make_plan(**common, output_dir=str(tmp_path / name)) for name in ("straight", "broken")),
        stop_after=5,
    )


def test_steps_after_the_checkpoint_are_done_again_once(make_plan):
    """A process killed between two saves: metrics.jsonl has steps that the checkpoint has not."""
    plan = make_plan(max_steps=6, save_steps=2)
    trained(plan, stop_after=4)
    log = Path(plan.run.output_dir) / "metrics.jsonl"
    extra = replace(steps_of(plan)[-1], step=5, loss=99.0)
    from fitune.track.metrics import to_line

    log.write_bytes(log.read_bytes() + to_line(extra))
    trained(plan, resume=True)
    assert [step.step for step in steps_of(plan)] == [1, 2, 3, 4, 5, 6]
    assert 99.0 not in losses(plan)


def test_the_same_rows_in_other_micro_batches_give_the_same_losses(make_plan, tmp_path):
    """Famous bug: accumulation normalised per micro-batch instead of per supervised token."""
    found = []
    for micro, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        plan = make_plan(
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            output_dir=str(tmp_path / f"micro-{micro}"),
        )
        trained(plan)
        found.append(losses(plan))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=2e-5)


def test_recompute_and_chunks_change_nothing_but_memory(make_plan, tmp_path):
    base = make_plan(
        tuning="full", gradient_checkpointing=False, loss="plain", output_dir=str(tmp_path / "a")
    )
    frugal = make_plan(
        tuning="full",
        gradient_checkpointing=True,
        loss="chunked",
        loss_chunk_tokens=16,
        output_dir=str(tmp_path / "b"),
    )
    trained(base)
    trained(frugal)
    assert losses(frugal) == pytest.approx(losses(base), rel=2e-5)


def test_the_second_step_is_measured_by_phase(make_plan):
    plan = make_plan()
    report = trained(plan)
    assert [bool(step.memory_bytes) for step in steps_of(plan)] == [False, True, False, False, False, False]
    assert report.memory is not None
    assert set(report.memory.phases) == set(Phase)
    assert report.memory.phases[Phase.IDLE] < report.memory.peak_bytes


def test_a_steps_seconds_end_when_the_device_is_through(make_plan, monkeypatch):
    """The optimizer's kernels are launched, and done later; none of its time is the next step's."""
    waited = []

    def wait_for(device):
        waited.append(device.type)
        time.sleep(0.3)

    monkeypatch.setattr(sys.modules["fitune.train.loop"], "wait_for", wait_for)
    plan = make_plan(max_steps=2)
    trained(plan)
    assert waited == ["cpu"] * 2
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


def test_every_figure_of_the_report_comes_from_the_log(make_plan):
    plan = make_plan(max_steps=5)
    report = trained(plan)
    steps = steps_of(plan)
    assert report.tokens == sum(step.tokens for step in steps)
    assert report.supervised_tokens == sum(step.supervised_tokens for step in steps)
    assert report.final_loss == steps[-1].loss
    assert report_of(plan) == report


def test_a_run_of_a_fitune_that_is_not_installed_ends_well(make_plan, monkeypatch):
    known = importlib.metadata.version

    def version(name):
        if name == "fitune":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    report = trained(make_plan(max_steps=1))
    assert report.status == "complete"
    assert report.versions.keys() == {"python", "torch", "transformers", "peft"}


def test_a_loss_that_is_not_finite_stops_before_the_update_and_says_so(make_plan):
    plan = make_plan(tuning="full", optimizer="sgd", learning_rate=1e6, max_grad_norm=0, max_steps=50)
    with pytest.raises(TrainingFailed, match=r"nothing was updated"):
        trained(plan)
    report = report_of(plan)
    assert report.status == "failed"
    assert "finite" in report.reason or "loss is" in report.reason
    assert report.steps == len(steps_of(plan))


def test_gradients_that_are_not_finite_name_the_rows(make_plan, monkeypatch):
    """The engine sees gradients and no rows; metrics.jsonl has none either."""
    monkeypatch.setattr("fitune.engine.plain.global_norm", lambda gradients: torch.tensor(float("nan")))
    with pytest.raises(
        TrainingFailed, match=r"gradients are not finite.*Rows of this step.*\[\d+, \d+"
    ) as caught:
        trained(make_plan())
    assert "metrics.jsonl" not in str(caught.value)


def test_an_earlier_run_is_not_overwritten_unasked(make_plan):
    plan = make_plan(max_steps=2)
    trained(plan)
    before = (Path(plan.run.output_dir) / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="earlier run"):
        trained(plan)
    assert (Path(plan.run.output_dir) / "metrics.jsonl").read_bytes() == before


def test_epochs_count_rows(make_plan):
    """56 rows, 8 a step: 7 steps an epoch."""
    plan = make_plan()
    plan = replace(plan, schedule=replace(plan.schedule, duration=Epochs(count=1.5)))
    report = trained(plan)
    assert report.total_steps == 11
    assert steps_of(plan)[6].epoch == pytest.approx(1.0)


def test_samples_show_answers_before_and_after(make_plan):
    plan = make_plan(samples=3, val_fraction=0.2, max_steps=2)
    said = iter(["before"] * 3 + ["after"] * 3)
    answering = callbacks(answer=lambda model, conversations: [next(said) for _ in conversations])
    report = run(plan, callbacks=answering)
    assert [(s.before, s.after) for s in report.samples] == [("before", "after")] * 3
    assert all(s.prompt.startswith("What is") for s in report.samples)


def test_plan_json_is_the_plan_that_ran(make_plan):
    plan = make_plan(max_steps=1)
    trained(plan, files={"recipe.yaml": "model: x\n"})
    assert written_plan(plan) == plan
    assert (Path(plan.run.output_dir) / "recipe.yaml").read_text() == "model: x\n"


def test_a_run_that_its_store_refuses_leaves_nothing(make_plan, tmp_path, monkeypatch):
    """A bucket may take the probe of a few bytes and nothing larger."""

    def refuse(*words, **named):
        raise StoreError("s3://bucket/run: too large")

    monkeypatch.setattr(import_module("fitune.train.run"), "begin_in_store", refuse)
    with pytest.raises(StoreError):
        trained(make_plan(output_dir=str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
