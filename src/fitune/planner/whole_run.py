"""The whole run of a plan on its data: steps, epochs, time and cost, and the schedule that they give."""

import math
from collections.abc import Iterator
from dataclasses import replace

from fitune.estimate.division import num_ranks
from fitune.estimate.overhead import checkpoint_bytes
from fitune.estimate.predict import largest_batch, predict_step_time
from fitune.planner.defaults import ROW_STEP
from fitune.recipe.recipe import Recipe
from fitune.units import (
    counted,
    format_bytes,
    format_count,
    format_dollars,
    format_percent,
    format_seconds,
)
from fitune.values.plan import Plan
from fitune.values.predictions import Epoch, WholeRun
from fitune.values.schedule import total_steps, warmup_steps
from fitune.values.words import describe_schedule


def whole_run(plan: Plan, epoch: Epoch, *, price_per_gpu_hour: float) -> WholeRun:
    """The run of ``plan`` over ``epoch`` as often as its schedule says. A data set smaller than a batch is one step."""
    batch, ranks = plan.batch, num_ranks(plan)
    per_epoch = -(-epoch.units // (batch.global_batch_size * ranks))
    steps = total_steps(plan.schedule, steps_per_epoch=per_epoch)
    of_a_step = replace(plan, batch=batch.of_units(-(-epoch.units // ranks)))
    seconds = predict_step_time(of_a_step, epoch.usual).step_seconds
    return WholeRun(
        epoch=epoch,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup_steps(plan.schedule, total=steps),
        step_seconds=seconds,
        cost=steps * seconds / 3600 * price_per_gpu_hour * plan.hardware.num_gpus,
    )


MOST_UNSAVED_S = 1800
"""Predicted seconds between two checkpoints where the recipe leaves it open: what a killed run loses at most."""
SAVING_SHARE, DISK_BANDWIDTH = 0.05, 1e9
"""A checkpoint that takes more than this share of them to write, at so many bytes/s (our assumption), is saved less
often."""


def with_timely_saves(recipe: Recipe, plan: Plan, run: WholeRun | None, *, step_seconds: float) -> Plan:
    """``plan``, which saves in equal parts of an epoch, none longer than MOST_UNSAVED_S or a step, unless checkpoints
    are so large that writing them would take too much of the time.

    Where the epoch is not known, once an epoch and every so many steps of ``step_seconds``. A recipe that says
    how often is obeyed.
    """
    if recipe.save_steps is not None or recipe.saves_per_epoch is not None:
        return plan
    seconds = max(MOST_UNSAVED_S, checkpoint_bytes(plan) / DISK_BANDWIDTH / SAVING_SHARE)
    if run is None:
        often = replace(plan.run, save_every=max(1, int(seconds / step_seconds)))
    else:
        steps = max(1, int(seconds / run.step_seconds))
        often = replace(plan.run, saves_per_epoch=math.ceil(run.steps_per_epoch / steps))
    return replace(plan, run=often)


WORTH_PACKING = 1.25
"""Times as long without packing from which it is said."""


def run_lines(run: WholeRun, plan: Plan) -> Iterator[str]:
    """Sentences for people: how long, what would shorten it, over which rows, the schedule, saves and evaluations."""
    batch, epoch = plan.batch, run.epoch
    yield _duration(run, plan)
    yield from _shorter(run, plan)
    about = "about " * bool(epoch.guess)
    mean = round(epoch.tokens / epoch.rows)
    line = f"{about}{counted(epoch.rows, 'row')} of {mean:,} tokens on average, the longest {epoch.longest_row:,}"
    line += f", in {counted(epoch.units, 'pack')}" * batch.packing
    line += f": {format_count(epoch.tokens)} tokens an epoch"
    yield f"{line}; guessed {epoch.guess}" if epoch.guess else line
    if epoch.bad_rows:
        count = sum(epoch.bad_rows.values())
        reasons = ", ".join(f"{number:,} × {reason}" for reason, number in epoch.bad_rows.items())
        then = "training stops at the first; on_bad_row: skip leaves such rows out"
        if plan.data.on_bad_row == "skip":
            then = "training leaves such rows out (on_bad_row: skip)"
        yield f"besides these, {counted(count, 'row')} read for this guess cannot be used ({reasons}): {then}"
    yield f"the learning rate {describe_schedule(plan.schedule, total=run.steps)}"
    yield _saved(run, plan)


def _shorter(run: WholeRun, plan: Plan) -> Iterator[str]:
    """Packing and a smaller seq_len, where they would help much."""
    batch, epoch, longest = plan.batch, run.epoch, run.epoch.longest_row
    if batch.packing:
        return
    if plan.model.separates_rows and run.steps != 1:
        # short rows one by one keep a device waiting for launches and weights: the same tokens in full packs do not
        full = largest_batch(plan)
        per_token = predict_step_time(plan).step_seconds / (
            full.tokens * batch.accumulation * num_ranks(plan)
        )
        packed = epoch.tokens * per_token * run.epochs
        if run.steps >= run.steps_per_epoch and run.seconds > WORTH_PACKING * packed:
            share = format_percent(epoch.tokens / epoch.rows / batch.seq_len, digits=0)
            yield (
                f"packing: true would train the same tokens in about {format_seconds(packed)}, in fewer and larger "
                f"steps: rows fill {share} of seq_len {batch.seq_len}"
            )
    spends = plan.recompute.blocks or plan.offload.activations != "device"
    if spends and longest <= batch.seq_len / 2:  # memory is planned for rows of seq_len
        enough = -(-longest // ROW_STEP) * ROW_STEP
        read = "row read for this guess" if epoch.guess else "row"
        yield (
            f"the longest {read} has {longest:,} tokens: seq_len: {enough} leaves room, so that less is recomputed or "
            "offloaded (longer rows are cut)"
        )


def _duration(run: WholeRun, plan: Plan) -> str:
    rows = counted(plan.batch.global_batch_size * num_ranks(plan), plan.batch.unit)
    epochs = "1 epoch"
    if run.steps != run.steps_per_epoch:
        number = f"{run.epochs:.2f}".rstrip("0").rstrip(".")
        epochs = f"{number} epochs of {counted(run.steps_per_epoch, 'step')}"
    about = "about " * bool(run.epoch.guess)
    line = f"{about}{counted(run.steps, 'step')} of {rows}, {epochs}, in {format_seconds(run.seconds)}"
    if run.cost:
        line += f" for {format_dollars(run.cost)}"
    if run.steps > run.steps_per_epoch:
        line += f"; an epoch takes {format_seconds(run.seconds / run.epochs)}"
        line += f", {format_dollars(run.cost / run.epochs)}" if run.cost else ""
    a_step = format_seconds(run.seconds / run.steps)
    return f"{line} ({a_step} a step on average; training alone: no reading, evaluating or saving)"


def _saved(run: WholeRun, plan: Plan) -> str:
    run_plan, data = plan.run, plan.data
    saves = "no checkpoint on the way, only the result at the end (save_steps: 0)"
    if run_plan.saves:
        steps = _steps_between(run, every=run_plan.save_every, per_epoch=run_plan.saves_per_epoch)
        size = format_bytes(checkpoint_bytes(plan))
        took = f" ({format_seconds(steps * run.step_seconds)})"
        saves = f"a checkpoint of {size} is saved {_often(run, steps, took=took)}"
        if steps * run_plan.keep_checkpoints < run.steps:
            saves += f"; the newest {run_plan.keep_checkpoints} are kept (keep_checkpoints)"
    if not (data.eval_sources or data.val_fraction):
        return f"{saves}; no rows are held out to evaluate (val_fraction, eval_data)"
    steps = _steps_between(run, every=run_plan.eval_every, per_epoch=run_plan.evals_per_epoch)
    return f"{saves}; held-out rows are evaluated before the first step and {_often(run, steps)}"


def _steps_between(run: WholeRun, *, every: int, per_epoch: int) -> int:
    parts = -(-run.steps_per_epoch // per_epoch) if per_epoch else run.steps
    return min(every, parts) if every else parts


def _often(run: WholeRun, steps: int, *, took: str = "") -> str:
    """``every 500 steps (27 min 3 s) and at the end``; at the end alone where the run is over by then."""
    if steps >= run.steps:
        return "at the end"
    return f"every step{took}" if steps == 1 else f"every {steps:,} steps{took} and at the end"
