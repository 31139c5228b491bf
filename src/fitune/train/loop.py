"""The loop: a generator of StepReport. The caller logs, evaluates, saves and stops."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from fitune.data.loader import GlobalBatch, Loader, LoaderState
from fitune.engine.protocol import EnterPhase, Update
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import TrainingFailed
from fitune.measure.communication import Waits
from fitune.measure.memory import MemoryMeter
from fitune.models.weights import require_finite
from fitune.spec.counts import achieved_mfu
from fitune.spec.plan import Plan
from fitune.spec.predictions import Phase
from fitune.spec.reports import StepReport
from fitune.spec.schedule import learning_rate, total_steps
from fitune.train.failure import Whereabouts
from fitune.train.prepare import Prepared
from fitune.train.spikes import LossWatch, row_words


def train(
    plan: Plan,
    prepared: Prepared,
    loader: Loader,
    *,
    meter: MemoryMeter,
    ranks: Ranks = ALONE,
    start_step: int = 0,
    start_at: LoaderState | None = None,
    where: Whereabouts | None = None,
    waits: Waits | None = None,
) -> Iterator[StepReport]:
    """One StepReport per optimizer step, from ``start_step`` to the end of the schedule.

    When a report is yielded its step is wholly done: the weights are new and the gradients forgotten.
    ``waits`` are those of this rank in collectives. ``where`` is kept up to date, for the caller to name the moment
    in which something fails.
    Raises TrainingFailed before the update when the loss or a gradient is not finite.
    """
    total = total_steps(plan.schedule, steps_per_epoch=loader.steps_per_epoch)
    state = start_at or LoaderState(epoch=0, position=0)
    where = where or Whereabouts()
    enter_phase = _telling(where, meter.enter)
    measured_steps = steps_to_measure(loader, start_step=start_step, total=total)
    losses = LossWatch()
    for step in range(start_step, total):
        where.step, where.doing = step + 1, "reading a batch"
        waiting_since = time.perf_counter()
        batch = loader.batch_at(state)
        if waits is not None:
            waits.take()  # what was waited for between two steps
        started = time.perf_counter()
        rate = learning_rate(plan.schedule, step=step, total=total)
        measured = (
            meter.measuring(prepared.resident_tensors, prepared.host)
            if step in measured_steps
            else nullcontext()
        )
        with measured:
            loss, update = _one_step(
                prepared, batch, rate, enter_phase, ranks, loaded_from=plan.model_path if step == 0 else None
            )
        wait_for(prepared.model.device)
        seconds = time.perf_counter() - started
        state = loader.after(state)
        yield StepReport(
            step=step + 1,
            total_steps=total,
            epoch=(step + 1) / loader.steps_per_epoch,
            loss=loss,
            learning_rate=rate,
            grad_norm=update.grad_norm,
            tokens=batch.tokens,
            supervised_tokens=batch.supervised_tokens,
            step_seconds=seconds,
            waiting_seconds=None if waits is None else min(waits.take(), seconds),
            data_seconds=started - waiting_since,
            tokens_per_second=batch.tokens / seconds,
            mfu=achieved_mfu(plan, batch.row_lengths, batch.supervised_tokens, seconds=seconds),
            loss_scale=update.loss_scale,
            skipped=update.skipped,
            jumped_rows=_rows_of_all(batch, ranks) if losses.jumps(loss) else (),
            memory_bytes=meter.take_peaks(),
        )


def wait_for(device: torch.device) -> None:
    """Until the step's last kernels, the optimizer's, are done: once a step, for its seconds to be true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _telling(where: Whereabouts, enter: EnterPhase) -> EnterPhase:
    """``enter``, with every change of phase noted in ``where`` first."""

    def enter_phase(phase: Phase) -> None:
        where.doing = phase.value
        where.sign()
        enter(phase)

    return enter_phase


def _one_step(
    prepared: Prepared,
    batch: GlobalBatch,
    rate: float,
    enter_phase: EnterPhase,
    ranks: Ranks,
    *,
    loaded_from: str | None,
) -> tuple[float, Update]:
    """Gradients of every micro-batch, then one update; the loss is the mean per supervised token.

    ``loaded_from``: whose weights these are; None once they were trained.
    """
    engine, count = prepared.engine, len(batch.micro_batches)
    losses: list[Tensor] = [
        engine.forward_backward(
            micro, supervised_tokens=batch.supervised_tokens, enter_phase=enter_phase, last=number == count
        )
        for number, micro in enumerate(batch.micro_batches, start=1)
    ]
    [summed] = ranks.summed([sum(part.item() for part in losses)])
    loss = summed / batch.supervised_tokens
    if not math.isfinite(loss):
        if loaded_from is not None:
            require_finite(prepared.model.whole, loaded_from)
        raise TrainingFailed(
            f"the loss is {loss}; nothing was updated. {_rows(batch)}",
            hint="look at those rows, lower learning_rate, or train in bf16 instead of fp16",
        )
    try:
        return loss, engine.update(learning_rate=rate, enter_phase=enter_phase)
    except TrainingFailed as error:  # an engine sees gradients and no rows
        raise TrainingFailed(f"{error.message}. {_rows(batch)}", hint=error.hint) from None


def _rows_of_all(batch: GlobalBatch, ranks: Ranks) -> tuple[int, ...]:
    """Rows of the step, those of the other ranks too, which have come to the same loss."""
    return tuple(row for rows in ranks.gathered(_row_ids(batch)) for row in rows)


def _row_ids(batch: GlobalBatch) -> list[int]:
    return [row for micro in batch.micro_batches for row in micro.row_ids]


def _rows(batch: GlobalBatch) -> str:
    return row_words(_row_ids(batch))


def steps_to_measure(loader: Loader, *, start_step: int, total: int) -> set[int]:
    """The second step of this process, when optimizer states exist, and the one with the heaviest micro-batch.

    The peak of the run is the peak of that one; the second is for runs that end before. The first is measured too where
    its own is heavier than all others.
    """
    if start_step >= total:
        return set()
    second = min(start_step + 1, total - 1)
    later, heaviest = loader.heaviest(range(second, total))
    _, opening = loader.heaviest(range(start_step, start_step + 1))
    return {second, later} | ({start_step} if opening.tokens > heaviest.tokens else set())
