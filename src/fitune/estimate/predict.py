"""The estimate of one plan: its largest micro-batch, bytes on device, host and disk, seconds of a step."""

from collections.abc import Sequence
from functools import reduce

from fitune.estimate.division import num_ranks
from fitune.estimate.memory import larger, memory_of
from fitune.estimate.overhead import (
    checkpoint_bytes,
    host_terms,
    nvme_bytes,
    room_bytes,
    usable_host_bytes,
    uses_host,
)
from fitune.estimate.step import StepStages, Terms, describe_step
from fitune.estimate.time import step_time_of
from fitune.estimate.transfers import communication_of
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.traits import largest_rows
from fitune.values.plan import Plan
from fitune.values.predictions import Estimate, MemoryBreakdown, StepTime


def predict(
    plan: Plan,
    *,
    heaviest: Sequence[StepStages] = (),
    usual: BatchShape | None = None,
) -> Estimate:
    """Memory of the ``heaviest`` micro-batches on one device, its host and its disks, and time of the ``usual`` one.

    Without them, of the largest that the plan allows: what has to fit before the data is known; and of ``usual_batch``.
    """
    usual = usual or usual_batch(plan)
    step = describe_step(plan, largest_batch(plan))
    time = step_time_of(step if step.shape == usual else describe_step(plan, usual))
    steps = heaviest or (step,)
    memory = reduce(larger, map(memory_of, steps))
    host = max(map(host_terms, steps), key=_total)
    return Estimate(
        memory=memory,
        usable_bytes=room_bytes(plan),
        time=time,
        tokens_per_second=usual.tokens * plan.batch.accumulation * num_ranks(plan) / time.step_seconds,
        host=host,
        usable_host_bytes=usable_host_bytes(plan.hardware) if uses_host(plan) else 0,
        nvme_bytes=max(map(nvme_bytes, steps)),
        usable_nvme_bytes=plan.hardware.nvme_bytes if "nvme" in plan.offload.places else 0,
        checkpoint_bytes=checkpoint_bytes(plan),
        communication_bytes=communication_of(plan).total_bytes,
    )


def _total(terms: Terms) -> int:
    return sum(terms.values())


def predict_memory(plan: Plan, shape: BatchShape | None = None) -> MemoryBreakdown:
    """Bytes by phase and term on one device, for a micro-batch of ``shape`` (the most the plan allows if None)."""
    return memory_of(describe_step(plan, shape or largest_batch(plan)))


def predict_step_time(plan: Plan, shape: BatchShape | None = None) -> StepTime:
    """Seconds by phase of one optimizer step: ``accumulation`` micro-batches and one update."""
    return step_time_of(describe_step(plan, shape or largest_batch(plan)))


def largest_batch(plan: Plan) -> BatchShape:
    """The most the plan allows: every row full, every token but the first of each row predicted.

    A token sees as many as in a pack of one row, although a pack is counted as two (``largest_rows``).
    """
    batch = plan.batch
    return BatchShape(
        tokens=batch.micro_batch_tokens,
        supervised_tokens=batch.most_labels,
        rows=len(largest_rows(plan)),
        longest_row=batch.seq_len,
    )


def usual_batch(plan: Plan) -> BatchShape:
    """Returns a micro-batch of average rows, or of average rows packed; the largest where the average is not known."""
    batch = plan.batch
    mean = batch.usual_row_tokens
    if mean == batch.seq_len:
        return largest_batch(plan)
    tokens = batch.micro_batch_tokens if batch.packing else len(batch.full_rows) * mean
    rows = max(1, tokens // mean)
    return BatchShape(tokens=tokens, supervised_tokens=tokens - rows, rows=rows, longest_row=mean)
