"""The estimate of one plan: its largest micro-batch, bytes on device, host and disk, seconds of a step."""

from fitune.estimate.blocks.site import masking_window
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
from fitune.estimate.step import Terms, before_states, describe_step
from fitune.estimate.time import step_time_of
from fitune.estimate.transfers import communication_of
from fitune.spec.model.block_profile import BatchShape
from fitune.spec.model.traits import has_scores
from fitune.spec.plan import Plan
from fitune.spec.predictions import Estimate, MemoryBreakdown, StepTime


def predict(
    plan: Plan,
    *,
    largest: BatchShape | None = None,
    usual: BatchShape | None = None,
    first: BatchShape | None = None,
) -> Estimate:
    """Memory of the ``largest`` micro-batch on one device, its host and its disks, and time of the ``usual`` one.

    Without them, of the largest that the plan allows: what has to fit before the data is known; and of ``usual_batch``.
    ``first``: the largest micro-batch of the first step, whose update makes the optimizer's states.
    """
    worst = largest_batch(plan)
    usual = usual or usual_batch(plan)
    step = describe_step(plan, largest or worst)
    time = step_time_of(step if step.shape == usual else describe_step(plan, usual))
    memory, host = memory_of(step), host_terms(step)
    if first is not None:
        early = before_states(describe_step(plan, first))
        memory, host = larger(memory, memory_of(early)), max(host, host_terms(early), key=_total)
    return Estimate(
        memory=memory,
        usable_bytes=room_bytes(plan),
        time=time,
        tokens_per_second=usual.tokens * plan.batch.accumulation * num_ranks(plan) / time.step_seconds,
        host=host,
        usable_host_bytes=usable_host_bytes(plan.hardware) if uses_host(plan) else 0,
        nvme_bytes=nvme_bytes(step),
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

    A pack is counted as two rows, whose attention outputs are joined into one more copy; where scores are written
    out or a window needs a mask, as the one row that takes most.
    """
    batch = plan.batch
    tokens = batch.micro_batch_tokens
    one_row = has_scores(plan) or 0 < masking_window(plan) < batch.seq_len
    return BatchShape(
        tokens=tokens,
        supervised_tokens=batch.most_labels,
        rows=len(batch.full_rows) * (2 if batch.packing and not one_row else 1),
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
