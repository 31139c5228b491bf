"""Steps, time and cost of a whole run, counted by hand."""

from dataclasses import replace

import pytest

from fitune.estimate.overhead import checkpoint_bytes
from fitune.estimate.predict import predict_step_time
from fitune.planner.search import find_plan
from fitune.planner.whole_run import run_lines, whole_run, with_timely_saves
from fitune.spec.model.block_profile import BatchShape
from fitune.spec.plan import Batch, Ddp, Epochs, Fraction, Recompute, Schedule, Single
from fitune.spec.predictions import Epoch
from fitune.spec.recipe.recipe import Recipe
from fitune.units import format_bytes
from plans import gpu, known, plan_for, recipe_of

USUAL = BatchShape(tokens=400, supervised_tokens=200, rows=4, longest_row=110)


def plan_of(*, rows=4, accumulation=2, gpus=1):
    return replace(
        plan_for(known("llama-3.1-8b"), hardware=gpu("rtx-4090", gpus=gpus), tuning="lora", precision="bf16"),
        batch=Batch(micro_batch_size=rows, accumulation=accumulation, seq_len=512, packing=False),
        schedule=Schedule(
            learning_rate=1e-4,
            kind="cosine",
            warmup=Fraction(of=0.1),
            duration=Epochs(count=3),
            max_grad_norm=1.0,
        ),
        sharding=Ddp() if gpus > 1 else Single(),
    )


def epoch_of(rows):
    return Epoch(rows=rows, tokens=100 * rows, longest_row=200, units=rows, usual=USUAL)


def test_steps_seconds_and_cost():
    plan = plan_of()
    run = whole_run(plan, epoch_of(81), price_per_gpu_hour=2.0)
    assert (run.steps_per_epoch, run.steps, run.warmup_steps) == (11, 33, 4)
    assert run.step_seconds == predict_step_time(plan, USUAL).step_seconds
    assert run.cost == pytest.approx(33 * run.step_seconds / 3600 * 2.0)
    assert run.epochs == 3


def test_rows_that_cannot_be_used_are_said_with_what_becomes_of_them():
    plan, bad = plan_of(), {"not JSON": 1_200, "no answer": 1}
    lines = list(
        run_lines(whole_run(plan, replace(epoch_of(81), bad_rows=bad), price_per_gpu_hour=2.0), plan)
    )
    assert lines[3] == (
        "besides these, 1,201 rows read for this guess cannot be used (1,200 × not JSON, 1 × no answer): training "
        "stops at the first; on_bad_row: skip leaves such rows out"
    )
    lenient = replace(plan, data=replace(plan.data, on_bad_row="skip"))
    lines = list(
        run_lines(
            whole_run(plan, replace(epoch_of(81), bad_rows={"not JSON": 1}), price_per_gpu_hour=2.0), lenient
        )
    )
    assert lines[3].startswith(
        "besides these, 1 row read for this guess cannot be used (1 × not JSON): training leaves"
    )


def test_packing_is_not_advised_where_there_is_one_step_already():
    plan = replace(plan_of(), schedule=replace(plan_of().schedule, duration=Epochs(count=1)))
    lines = list(run_lines(whole_run(plan, epoch_of(8), price_per_gpu_hour=2.0), plan))
    assert lines[0].startswith("1 step of 8 rows, 1 epoch")
    assert not any("packing" in line for line in lines)


def test_devices_share_the_rows_and_each_costs():
    plan = plan_of(gpus=2)
    run = whole_run(plan, epoch_of(160), price_per_gpu_hour=2.0)
    ranks = plan.hardware.num_gpus
    assert run.steps_per_epoch == 160 // (8 * ranks)
    assert run.cost == pytest.approx(run.seconds / 3600 * 2.0 * ranks)


def test_data_smaller_than_a_batch_is_one_step_of_fewer_micro_batches():
    plan = plan_of(accumulation=8)
    run = whole_run(plan, epoch_of(8), price_per_gpu_hour=0.0)
    assert (run.steps_per_epoch, run.steps) == (1, 3)
    assert run.step_seconds == predict_step_time(plan_of(accumulation=2), USUAL).step_seconds


def test_the_lines_say_how_long_and_what_shapes_the_result():
    plan = plan_of()
    lines = list(run_lines(whole_run(plan, epoch_of(81), price_per_gpu_hour=2.0), plan))
    assert "33 steps of 8 rows, 3 epochs of 11 steps" in lines[0]
    assert " a step on average; training alone" in lines[0]
    assert "$" in lines[0]
    assert "packing: true would train the same tokens in about" in lines[1]
    assert "81 rows of 100 tokens on average" in lines[2]
    assert "1.0e-04 over 4 steps" in lines[3]
    assert "no checkpoint on the way" in lines[4]
    run_plan = replace(plan.run, saves_per_epoch=2)
    lines = list(
        run_lines(whole_run(plan, epoch_of(81), price_per_gpu_hour=2.0), replace(plan, run=run_plan))
    )
    assert f"a checkpoint of {format_bytes(checkpoint_bytes(plan))} is saved every 6 steps (" in lines[4]
    assert ") and at the end" in lines[4]


def test_short_rows_are_said_to_be_slow_and_full_ones_are_not():
    plan = plan_of(rows=1, accumulation=8)
    short = replace(USUAL, tokens=40, supervised_tokens=20, rows=1, longest_row=44)
    epoch = replace(epoch_of(800), tokens=40 * 800, usual=short)
    lines = list(run_lines(whole_run(plan, epoch, price_per_gpu_hour=0.0), plan))
    assert "rows fill 8 % of seq_len 512" in lines[1]
    full = replace(USUAL, tokens=512, supervised_tokens=500, rows=1, longest_row=512)
    epoch = replace(epoch_of(800), tokens=512 * 800, usual=full)
    assert not any("fill" in line for line in run_lines(whole_run(plan, epoch, price_per_gpu_hour=0.0), plan))


@pytest.mark.parametrize(("rows", "parts"), [(800, 1), (1_600_000, 1), (16_000_000, 10)])
def test_a_long_epoch_is_saved_so_often_that_no_part_takes_more_than_half_an_hour(rows, parts):
    plan = plan_of()
    asked = Recipe(model="m")
    run = replace(whole_run(plan, epoch_of(rows), price_per_gpu_hour=0.0), step_seconds=1800 / 200_000)
    saved = with_timely_saves(asked, plan, run, step_seconds=1.0).run
    assert (saved.save_every, saved.saves_per_epoch) == (0, parts)
    for pinned in (Recipe(model="m", save_steps=0), Recipe(model="m", saves_per_epoch=1)):
        assert with_timely_saves(pinned, plan, run, step_seconds=1.0) == plan


def test_an_epoch_of_unknown_length_is_saved_each_half_hour_of_full_batches():
    plan = plan_of()
    for seconds, steps in ((7.0, 257), (4000.0, 1)):
        saved = with_timely_saves(Recipe(model="m"), plan, None, step_seconds=seconds).run
        assert (saved.save_every, saved.saves_per_epoch) == (steps, plan.run.saves_per_epoch)


def test_a_checkpoint_that_takes_long_to_write_is_saved_less_often():
    plan = plan_for(known("llama-3.1-70b"), hardware=gpu("h100", gpus=8), precision="bf16-master")
    seconds = checkpoint_bytes(plan) / 1e9
    assert seconds > 900
    saved = with_timely_saves(Recipe(model="m"), plan, None, step_seconds=10.0).run
    assert saved.save_every == int(20 * seconds / 10)


def test_a_longer_seq_len_than_rows_need_is_said_where_it_costs_time():
    plan = replace(plan_of(), recompute=Recompute(blocks=4))
    run = whole_run(plan, epoch_of(81), price_per_gpu_hour=0.0)
    assert "the longest row has 200 tokens: seq_len: 256 leaves room" in " ".join(run_lines(run, plan))
    keeps = replace(plan, recompute=Recompute(blocks=0))
    assert "leaves room" not in " ".join(run_lines(run, keeps))
    longer = replace(run, epoch=replace(run.epoch, longest_row=400))
    assert "leaves room" not in " ".join(run_lines(longer, plan))


def test_packs_are_not_offered_where_rows_of_one_stream_would_see_each_other():
    """LFM2's convolutions look back along the stream: its plans take one row at a time, and say so."""
    report = find_plan(
        recipe_of("LiquidAI/LFM2-350M", tuning="lora"),
        model=known("LiquidAI/LFM2-350M"),
        hardware=gpu("rtx-4090"),
    )
    plan = report.chosen.plan
    assert (plan.batch.packing, plan.batch.micro_batch_size) == (False, 1)
    assert any("one row at a time" in line for line in report.decisions)
    short = BatchShape(tokens=20, supervised_tokens=10, rows=1, longest_row=20)
    run = whole_run(plan, replace(epoch_of(160), usual=short), price_per_gpu_hour=0.0)
    assert not any("packing" in line for line in run_lines(run, plan))
