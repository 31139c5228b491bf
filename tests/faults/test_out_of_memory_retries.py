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
    "micro_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "loss": "plain",
    "learning_rate": 1e-3,
    "max_steps": 2,
}
"""Training takes more than loading and exporting."""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tuning": "full", "save_steps": 1, "val_fraction": 0.2, "eval_steps": 2},
        {"packing": True, "seq_len": 80, "save_steps": 1},
    ],
    ids=["anew", "full", "packed"],
)
def test_the_losses_are_those_of_a_run_that_never_failed(train, tmp_path, order, settings):
    """What the failed attempt held is let go of: the device has no room for two."""
    common = {**LARGE, **settings}
    never, failed = tmp_path / "never", tmp_path / "failed"
    whole, _ = counted(lambda: train(output_dir=never, **common))
    expected_order = order.copy()
    order.clear()
    budget = int(0.97 * whole.peak_bytes)
    device, (code, out, err) = counted(lambda: train(output_dir=failed, **common), budget)
    assert (code, err) == (0, "")
    assert device.refusals == 1
    assert losses(failed) == pytest.approx(losses(never), rel=1e-6)
    (retry,) = report_of(failed).retries
    assert retry.after_step == (retry.shortage.step - 1 if "save_steps" in settings else 0)
    done_again = expected_order[retry.after_step :]
    assert order == expected_order[: retry.shortage.step] + done_again
    batches = [written_plan(run).batch for run in (never, failed)]
    assert [(batch.micro_batch_size, batch.accumulation) for batch in batches] == [(16, 1), (8, 2)]
    assert "attempt 1: out of memory" in out


def test_a_resumed_run_does_not_run_out_again(train, tmp_path):
    """The micro-batch that had no room is not tried once more, whoever chose it."""
    settings = LARGE | {"lr_scheduler_type": "constant", "save_steps": 1}
    whole, _ = counted(lambda: train(output_dir=tmp_path / "never", **settings))
    budget = int(0.97 * whole.peak_bytes)
    counted(lambda: train(output_dir=tmp_path / "run", **settings), budget)
    longer = settings | {"max_steps": 3, "resume": True}
    device, (code, _, err) = counted(lambda: train(output_dir=tmp_path / "run", **longer), budget)
    assert (code, err, device.refusals) == (0, "", 0)
    assert written_plan(tmp_path / "run").batch.micro_batch_size == 8
    steps = steps_of(tmp_path / "run")
    assert [len(step.retries) for step in steps] == [1, 0, 0]


def test_every_attempt_is_told(train, tmp_path):
    """In the log, in metrics.jsonl, in report.json and on the page: which one, why, from what plan to what plan."""
    whole, _ = counted(lambda: train(output_dir=tmp_path / "never", **LARGE | {"max_steps": 1}))
    failed = tmp_path / "failed"
    device, (code, out, _) = counted(lambda: train(output_dir=failed, **LARGE), int(0.45 * whole.peak_bytes))
    assert code == 0
    assert device.refusals == 2
    first, second = report_of(failed).retries
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.after == second.before
    assert "micro_batch_size 16 × 1 accumulated" in first.before
    assert "micro_batch_size 4 × 4 accumulated" in second.after
    assert second.predicted_after_bytes < first.predicted_after_bytes < first.predicted_bytes
    assert first.shortage.doing in ("forward", "loss", "backward")
    assert first.shortage.in_use_bytes > 0
    assert steps_of(failed)[0].retries == (first, second)
    assert all(not step.retries for step in steps_of(failed)[1:])
    for told in (out, (failed / "report.html").read_text()):
        assert "attempt 2: out of memory" in told
        assert f"{first.before} → {first.after}" in told
        assert "attempt 3 begins anew" in told
    decisions = json.loads((failed / "estimate.json").read_text())["decisions"]
    assert f"{first.after} instead of {first.before}: attempt 1 ran out of memory" in decisions


def test_one_row_that_does_not_fit_is_an_error_with_both_figures_and_what_to_try(train, tmp_path):
    one = {**LARGE, "micro_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    whole, _ = counted(lambda: train(output_dir=tmp_path / "never", **one))
    device, (code, _, err) = counted(
        lambda: train(output_dir=tmp_path / "failed", **one, tuning="full"), int(0.9 * whole.peak_bytes)
    )
    assert code == 3
    assert device.refusals == 1
    assert "predicted" in err
    assert "measured" in err
    assert "no smaller micro-batch: the micro-batch is one row already" in err
    assert "tuning: lora" in err
    report = report_of(tmp_path / "failed")
    assert report.failure is not None
    assert report.failure.shortage is not None
    assert (report.status, report.failure.error) == ("failed", "OutOfMemory")


def test_a_method_that_adds_no_gradients_up_says_so(train, tmp_path):
    settings = {**LARGE, "tuning": "lomo"}
    whole, _ = counted(lambda: train(output_dir=tmp_path / "never", **settings))
    device, (code, _, err) = counted(
        lambda: train(output_dir=tmp_path / "failed", **settings), int(0.97 * whole.peak_bytes)
    )
    assert (code, device.refusals) == (3, 1)
    assert "cannot be added up over several micro-batches" in err
    assert "micro_batch_size: 8 (a smaller global batch: another run)" in err
