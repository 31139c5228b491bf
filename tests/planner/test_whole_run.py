"""Steps, time and cost of a whole run, counted by hand."""

from dataclasses import replace

import pytest

from fitune.estimate.overhead import checkpoint_bytes
from fitune.estimate.predict import predict_step_time
from fitune.planner.whole_run import run_lines, whole_run, with_timely_saves
from fitune.units import format_bytes
from fitune.values.model.block_profile import BatchShape
from fitune.values.plan import Batch, Ddp, Epochs, Fraction, Recompute, Schedule, Single
from fitune.values.predictions import Epoch
from plans import gpu, known, plan_for, recipe_of, report_of

USUAL = BatchShape(tokens=400, supervised_tokens=200, rows=4, longest_row=110)


def plan_of(*, rows=4, accumulation=2, gpus=1, epochs=3):
    return plan_for(
        known("llama-3.1-8b"), hardware=gpu("rtx-4090", gpus=gpus), tuning="lora", precision="bf16",
        batch=Batch(micro_batch_size=rows, accumulation=accumulation, seq_len=512, packing=False),
        schedule=Schedule(
            learning_rate=1e-4, kind="cosine", warmup=Fraction(of=0.1), duration=Epochs(count=epochs),
            max_grad_norm=1.0,
        ),
        sharding=Ddp() if gpus > 1 else Single(),
    )  # fmt: skip


def run_of(plan, rows, *, row_tokens=100, **epoch):
    """The run over this number of rows, at 2 $ an hour and GPU, and its lines."""
    numbers = {"longest_row": 200, "usual": USUAL, **epoch}
    whole = whole_run(
        plan, Epoch(rows=rows, units=rows, tokens=row_tokens * rows, **numbers), price_per_gpu_hour=2.0
    )
    return whole, list(run_lines(whole, plan))


def test_steps_seconds_and_cost():
    plan = plan_of()
    run, _ = run_of(plan, 81)
    assert (run.steps_per_epoch, run.steps, run.warmup_steps, run.epochs) == (11, 33, 4, 3)
    assert run.step_seconds == predict_step_time(plan, USUAL).step_seconds
    assert run.cost == pytest.approx(33 * run.step_seconds / 3600 * 2.0)


def test_rows_that_cannot_be_used_are_said_with_what_becomes_of_them():
    said = run_of(plan_of(), 81, bad_rows={"not JSON": 1_200, "no answer": 1})[1][3]
    assert said.startswith(
        "besides these, 1,201 rows read for this guess cannot be used (1,200 × not JSON, 1 × no answer): training "
        "stops at the first; on_bad_row: skip leaves such rows out"
    )
    plan = replace(plan_of(), data=replace(plan_of().data, on_bad_row="skip"))
    assert "(1 × not JSON): training leaves" in run_of(plan, 81, bad_rows={"not JSON": 1})[1][3]


def test_devices_share_the_rows_and_each_costs_and_too_few_rows_are_one_step_of_fewer_micro_batches():
    run, _ = run_of(plan_of(gpus=2), 160)
    assert run.steps_per_epoch == 160 // (8 * 2)
    assert run.cost == pytest.approx(run.seconds / 3600 * 2.0 * 2)
    run, _ = run_of(plan_of(accumulation=8), 7)
    assert (run.steps_per_epoch, run.steps) == (1, 3)
    assert run.step_seconds == predict_step_time(plan_of(), USUAL).step_seconds


def test_the_lines_say_how_long_and_what_shapes_the_result():
    plan = plan_of()
    _, lines = run_of(plan, 81)
    for words, line in (
        ("33 steps of 8 rows, 3 epochs of 11 steps", lines[0]),
        ("packing: true would train the same tokens in about", lines[1]),
        ("rows fill 20 % of seq_len 512", lines[1]),
        ("81 rows of 100 tokens on average", lines[2]),
        ("1.0e-04 over 4 steps", lines[3]),
        ("no checkpoint on the way", lines[4]),
    ):
        assert words in line
    saved = run_of(replace(plan, run=replace(plan.run, saves_per_epoch=2)), 81)[1][4]
    assert f"a checkpoint of {format_bytes(checkpoint_bytes(plan))} is saved every 6 steps (" in saved
    assert ") and at the end" in saved


def test_packing_is_not_advised_for_full_rows_or_one_step():
    for tokens, rows, epochs, advised in ((40, 800, 3, True), (512, 800, 3, False), (40, 8, 1, False)):
        usual = replace(USUAL, tokens=tokens, supervised_tokens=20, rows=1, longest_row=min(512, tokens + 4))
        _, lines = run_of(
            plan_of(rows=1, accumulation=8, epochs=epochs), rows, row_tokens=tokens, usual=usual
        )
        assert ("rows fill 8 % of seq_len 512" in lines[1]) == advised
        assert any("packing" in line for line in lines) == advised
    assert lines[0].startswith("1 step of 8 rows, 1 epoch")


RECIPE = recipe_of("m")


@pytest.mark.parametrize(("rows", "parts"), [(800, 1), (1_600_000, 1), (16_000_000, 10)])
def test_a_long_epoch_is_saved_so_often_that_no_part_takes_more_than_half_an_hour(rows, parts):
    plan = plan_of()
    run = replace(run_of(plan, rows)[0], step_seconds=1800 / 200_000)
    saved = with_timely_saves(RECIPE, plan, run, step_seconds=1.0).run
    assert (saved.save_every, saved.saves_per_epoch) == (0, parts)
    for pin in ("save_steps: 0", "saves_per_epoch: 1"):
        assert with_timely_saves(recipe_of("m", pin), plan, run, step_seconds=1.0) == plan


@pytest.mark.parametrize(("seconds", "steps"), [(7.0, 257), (4000.0, 1)])
def test_an_epoch_of_unknown_length_is_saved_each_half_hour_of_full_batches(seconds, steps):
    plan = plan_of()
    saved = with_timely_saves(RECIPE, plan, None, step_seconds=seconds).run
    assert (saved.save_every, saved.saves_per_epoch) == (steps, plan.run.saves_per_epoch)


def test_a_checkpoint_that_takes_long_to_write_is_saved_less_often():
    plan = plan_for(known("llama-3.1-70b"), hardware=gpu("h100", gpus=8), precision="bf16-master")
    seconds = checkpoint_bytes(plan) / 1e9
    assert seconds > 900
    assert with_timely_saves(RECIPE, plan, None, step_seconds=10.0).run.save_every == int(20 * seconds / 10)


@pytest.mark.parametrize(
    ("recomputed", "longest", "said"), [(4, 200, True), (0, 200, False), (4, 400, False)]
)
def test_a_longer_seq_len_than_rows_need_is_said_where_it_costs_time(recomputed, longest, said):
    plan = replace(plan_of(), recompute=Recompute(blocks=recomputed))
    text = " ".join(run_of(plan, 81, longest_row=longest)[1])
    assert ("the longest row has 200 tokens: seq_len: 256 leaves room" in text) is said
    assert ("leaves room" in text) is said


def test_packs_are_not_offered_where_rows_of_one_stream_would_see_each_other():
    """LFM2's convolutions look back along the stream: its plans take one row at a time, and say so."""
    report = report_of("LiquidAI/LFM2-350M", "rtx-4090", "tuning: lora")
    plan = report.chosen.plan
    assert (plan.batch.packing, plan.batch.micro_batch_size) == (False, 1)
    assert any("one row at a time" in line for line in report.decisions)
    short = BatchShape(tokens=20, supervised_tokens=10, rows=1, longest_row=20)
    assert not any("packing" in line for line in run_of(plan, 160, usual=short)[1])
