"""Memory that runs out in a step costs time, never the run: smaller micro-batches, the same global batch, the same
losses (row 19)."""

import gc
import json

import pytest

from faults.budgets import Budget
from fitune.data.loader import Loader
from runs import losses, report_of, steps_of, written_plan


@pytest.fixture
def order(monkeypatch):
    """The rows of every global batch that a run asks for."""
    seen = []
    real = Loader.batch_at

    def batch_at(loader, state):
        batch = real(loader, state)
        seen.append([row for micro in batch.micro_batches for row in micro.row_ids])
        return batch

    monkeypatch.setattr(Loader, "batch_at", batch_at)
    return seen


def counted(run, budget=None):
    gc.collect()
    with Budget(budget) as device:
        result = run()
    return device, result


LARGE = {
    "micro_batch_size": 16, "gradient_accumulation_steps": 1, "loss": "plain", "learning_rate": 1e-3, "max_steps": 2,
}  # fmt: skip
"""Training takes more than loading and exporting."""


@pytest.mark.parametrize(
    "settings",
    [
        {"tuning": "full", "val_fraction": 0.2, "eval_steps": 2},
        {"packing": True, "seq_len": 80},
    ],
    ids=["full", "packed"],
)
def test_the_losses_are_those_of_a_run_that_never_failed_and_resumed_it_does_not_run_out_again(
    train, tmp_path, order, settings
):
    """What the failed attempt held is let go of: the device has no room for two. The micro-batch that had no room is
    not tried once more, whoever chose it."""
    common = {**LARGE, **settings, "save_steps": 1, "lr_scheduler_type": "constant"}
    never, failed = tmp_path / "never", tmp_path / "failed"
    whole, _ = counted(lambda: train(output_dir=never, **common))
    expected_order = order.copy()
    order.clear()
    budget = int(0.97 * whole.peak_bytes)
    device, ended = counted(lambda: train(output_dir=failed, **common), budget)
    assert (ended.code, ended.err, device.refusals) == (0, "", 1)
    assert "attempt 1: out of memory" in ended.out
    assert losses(failed) == pytest.approx(losses(never), rel=1e-6)
    (retry,) = report_of(failed).retries
    assert retry.after_step == retry.shortage.step - 1
    assert order == expected_order[: retry.shortage.step] + expected_order[retry.after_step :]
    device, ended = counted(
        lambda: train("--resume", output_dir=failed, **{**common, "max_steps": 3}), budget
    )
    assert (ended.code, ended.err, device.refusals) == (0, "", 0)
    batches = [written_plan(run).batch for run in (never, failed)]
    assert [(batch.micro_batch_size, batch.accumulation) for batch in batches] == [(16, 1), (8, 2)]
    retried = [len(step.retries) for step in steps_of(failed)]
    assert retried == [step == retry.shortage.step for step in (1, 2, 3)]


def test_every_attempt_is_told(train, tmp_path, order):
    """In the log, in metrics.jsonl, in report.json and on the page: which one, why, from what plan to what plan."""
    never, failed = tmp_path / "never", tmp_path / "failed"
    whole, _ = counted(lambda: train(output_dir=never, **LARGE))
    expected_order = order.copy()
    device, ended = counted(lambda: train(output_dir=failed, **LARGE), int(0.45 * whole.peak_bytes))
    assert (ended.code, device.refusals) == (0, 2)
    assert losses(failed) == pytest.approx(losses(never), rel=1e-6)
    assert order[-2:] == expected_order, "nothing was saved, so it begins anew"
    first, second = report_of(failed).retries
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.after == second.before
    assert "micro_batch_size 16 × 1 accumulated" in first.before
    assert "micro_batch_size 4 × 4 accumulated" in second.after
    assert second.predicted_after_bytes < first.predicted_after_bytes < first.predicted_bytes
    assert first.shortage.doing in ("forward", "loss", "backward")
    assert first.shortage.in_use_bytes > 0
    assert [step.retries for step in steps_of(failed)] == [(first, second), ()]
    for told in (ended.out, (failed / "report.html").read_text()):
        assert "attempt 2: out of memory" in told
        assert f"{first.before} → {first.after}" in told
        assert "attempt 3 begins anew" in told
    decisions = json.loads((failed / "estimate.json").read_text())["decisions"]
    assert f"{first.after} instead of {first.before}: attempt 1 ran out of memory" in decisions


def test_one_row_that_does_not_fit_is_an_error_with_both_figures_and_what_to_try(train, tmp_path):
    one = {**LARGE, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    whole, _ = counted(lambda: train(output_dir=tmp_path / "never", **one))
    device, ended = counted(
        lambda: train(output_dir=tmp_path / "failed", **one, tuning="full"), int(0.9 * whole.peak_bytes)
    )
    ended.ends(
        3,
        "predicted",
        "measured",
        "no smaller micro-batch: the micro-batch is one row already",
        "tuning: lora",
    )
    assert device.refusals == 1
    report = report_of(tmp_path / "failed")
    assert (report.status, report.failure.error) == ("failed", "OutOfMemory")
    assert report.failure.shortage is not None
