"""The loop: a generator of StepReport. The caller logs, evaluates, saves and stops.

Steps whose loss jumps are told with their rows, and steps of nothing but zeros; nothing is rewound or left out.
"""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor

from fitune.data.loader import Loader, LoaderState
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import TrainingFailed
from fitune.measure.communication import Waits
from fitune.measure.memory import MemoryMeter
from fitune.models.weights import require_finite
from fitune.train.failure import Whereabouts
from fitune.train.prepare import Prepared
from fitune.values.counts import achieved_mfu
from fitune.values.plan import Plan
from fitune.values.predictions import Phase
from fitune.values.reports import StepReport
from fitune.values.schedule import learning_rate, total_steps


def train(
    plan: Plan,
    prepared: Prepared,
    loader: Loader,
    *,
    meter: MemoryMeter,
    ranks: Ranks = ALONE,
    start_step: int = 0,
    start_at: LoaderState | None = None,
    earlier: Sequence[StepReport] = (),
    where: Whereabouts | None = None,
    waits: Waits | None = None,
) -> Iterator[StepReport]:
    """One StepReport per optimizer step, from ``start_step`` to the end of the schedule; ``earlier`` ones are of the
    steps before, as a checkpoint tells of them.

    When a report is yielded its step is wholly done: the weights are new and the gradients forgotten.
    ``waits`` are those of this rank in collectives. ``where`` is kept up to date, for the caller to name the moment
    in which something fails.
    Raises TrainingFailed before the update when the loss or a gradient is not finite.
    """
    total = total_steps(plan.schedule, steps_per_epoch=loader.steps_per_epoch)
    state = start_at or LoaderState(epoch=0, position=0)
    where = where or Whereabouts()

    def enter_phase(phase: Phase) -> None:
        """Notes the phase as the run's activity and a sign of life, and tells the memory meter."""
        where.doing = phase.value
        where.sign()
        meter.enter(phase)

    engine, watch = prepared.engine, LossWatch(earlier)
    measured_steps = steps_to_measure(loader, start_step=start_step, total=total)
    for step in range(start_step, total):
        where.step, where.doing = step + 1, "reading a batch"
        waiting_since = time.perf_counter()
        batch = loader.batch_at(state)
        divisor = engine.model.divisor(rows=len(batch.row_lengths), supervised_tokens=batch.supervised_tokens)
        row_ids = [row for micro in batch.micro_batches for row in micro.row_ids]
        if waits is not None:
            waits.take()  # what was waited for between two steps
        started = time.perf_counter()
        rate = learning_rate(plan.schedule, step=step, total=total)
        is_measured = step in measured_steps
        with meter.measuring(prepared.resident_tensors, prepared.host) if is_measured else nullcontext():
            losses: list[Tensor] = []
            for number, micro in enumerate(batch.micro_batches, start=1):
                losses.append(
                    engine.forward_backward(
                        micro, divisor=divisor, enter_phase=enter_phase,
                        last=number == len(batch.micro_batches),
                    )
                )  # fmt: skip
            [summed] = ranks.summed([sum(part.item() for part in losses)])
            loss = summed / divisor
            if not math.isfinite(loss):
                raise _not_finite(plan, prepared, loss, row_ids, step=step)
            try:
                update = engine.update(learning_rate=rate, enter_phase=enter_phase)
            except TrainingFailed as error:  # an engine sees gradients and no rows
                raise TrainingFailed(f"{error.message}. {row_words(row_ids)}", hint=error.hint) from None
            losses.clear()  # between two steps only what is resident stays
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
            jumped_rows=tuple(chain.from_iterable(ranks.gathered(row_ids))) if watch.jumps(loss) else (),
            memory_bytes=meter.take_peaks(),
        )


def _not_finite(
    plan: Plan, prepared: Prepared, loss: float, rows: Sequence[int], *, step: int
) -> TrainingFailed:
    """The error of a loss that is no number. Raises ModelError where the model's own weights are not finite."""
    if step == 0:
        require_finite(prepared.model.whole, plan.model_path)
    return TrainingFailed(
        f"the loss is {loss}; nothing was updated. {row_words(rows)}",
        hint="look at those rows, lower learning_rate, or train in bf16 instead of fp16",
    )


def wait_for(device: torch.device) -> None:
    """Until the step's last kernels, the optimizer's, are done: once a step, for its seconds to be true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def steps_to_measure(loader: Loader, *, start_step: int, total: int) -> set[int]:
    """The second step of this process, when optimizer states exist, and those with its heaviest micro-batches.

    The peak of the run is among theirs; the second is for runs that end before.
    """
    if start_step >= total:
        return set()
    heaviest = loader.heaviest(range(start_step, total))
    return {min(start_step + 1, total - 1), *(heavy.step for heavy in heaviest)}


WATCHED_STEPS = 20
"""Steps before, which a loss is held against, and which the counts of ``StepWatch`` go back to."""

_LEAST_STEPS = 8
_SPREADS, _LEAST_NATS = 6.0, 0.5
"""A jump is above the median by six times the mean distance from it, and by half a nat: small losses are noisy."""


class LossWatch:
    """Remembers the losses of the last steps, at first those of ``earlier`` ones."""

    def __init__(self, earlier: Iterable[StepReport] = ()) -> None:
        self._losses = deque((step.loss for step in earlier), maxlen=WATCHED_STEPS)

    def jumps(self, loss: float) -> bool:
        """True if ``loss`` lies far above the last ones; it is one of them from now on."""
        has_jumped = False
        if len(self._losses) >= _LEAST_STEPS:
            usual = statistics.median(self._losses)
            spread = statistics.fmean(abs(one - usual) for one in self._losses)
            has_jumped = loss - usual > max(_SPREADS * spread, _LEAST_NATS)
        self._losses.append(loss)
        return has_jumped


_ZEROS = 3
_ZERO_MEANS = {
    "loss": "no token is learned, or the kernels of this device do not work; look at the labels "
    "(train_on_prompt), and compare with a few steps on the CPU (--gpu cpu)",
    "gradient norm": "no weight changes; look at what is trained (lora_target_modules), and compare with a few steps "
    "on the CPU (--gpu cpu)",
}
_FAR_ABOVE, _FAR_STEPS = 100, WATCHED_STEPS


class StepWatch:
    """Counts the steps in a row whose loss or gradients' norm is exactly 0, or whose norm is far above what it is
    clipped to; 0 is no clipping. It begins behind ``earlier`` ones."""

    def __init__(self, clipped_at: float, earlier: Iterable[StepReport] = ()) -> None:
        self._clipped_at = clipped_at
        self._counts: Counter[str] = Counter()
        for step in earlier:
            self._count(loss=step.loss, grad_norm=step.grad_norm)

    def _count(self, *, loss: float, grad_norm: float) -> None:
        signs = {"loss": loss == 0, "gradient norm": grad_norm == 0}
        signs["clipped"] = 0 < self._clipped_at * _FAR_ABOVE < grad_norm
        for name, is_there in signs.items():
            self._counts[name] = self._counts[name] + 1 if is_there else 0

    def warnings(self, *, step: int, loss: float, grad_norm: float) -> Iterator[str]:
        """Yields a warning with the third zero in a row, and with the twentieth norm that is clipped by so much."""
        self._count(loss=loss, grad_norm=grad_norm)
        for name, meaning in _ZERO_MEANS.items():
            if self._counts[name] == _ZEROS:
                yield f"step {step}: the {name} was exactly 0 in the last {_ZEROS} steps: {meaning}"
        if self._counts["clipped"] == _FAR_STEPS:
            yield (
                f"step {step}: the gradient norm was more than {_FAR_ABOVE} × max_grad_norm ({self._clipped_at:g}) in "
                f"the last {_FAR_STEPS} steps, now {grad_norm:.3g}: each step follows a hundredth of its gradient at "
                "most; try a lower learning_rate, or look at the rows"
            )


_ROWS_NAMED = 20


def row_words(rows: Sequence[int]) -> str:
    """Names the rows of a step for people."""
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return f"Rows of this step, counted from 0 in the kept rows: {list(rows[:_ROWS_NAMED])}{more}"
