"""Everything the arithmetic says about one plan."""

from fitune.estimate.communication import communication_of
from fitune.estimate.host import checkpoint_bytes, host_terms, nvme_bytes, usable_host_bytes
from fitune.estimate.memory import memory_of
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.shape import largest_batch
from fitune.estimate.shares import num_ranks
from fitune.estimate.step import describe_step
from fitune.estimate.time import predict_step_time
from fitune.spec.plan import Offload, Plan
from fitune.spec.reports import Estimate
from fitune.spec.shape import BatchShape


def predict(plan: Plan, *, largest: BatchShape | None = None, usual: BatchShape | None = None) -> Estimate:
    """Memory of the ``largest`` micro-batch on one device, its host and its disks, and time of the ``usual`` one.

    Without them, of the largest the plan allows: what has to fit before the data is known.
    """
    worst = largest_batch(plan)
    usual = usual or worst
    time = predict_step_time(plan, usual)
    step = describe_step(plan, largest or worst)
    return Estimate(
        memory=memory_of(step),
        usable_bytes=usable_bytes(plan.hardware),
        time=time,
        tokens_per_second=usual.tokens * plan.batch.accumulation * num_ranks(plan) / time.step_seconds,
        host=host_terms(step),
        usable_host_bytes=usable_host_bytes(plan.hardware) if plan.offload != Offload() else 0,
        nvme_bytes=nvme_bytes(step),
        usable_nvme_bytes=plan.hardware.nvme_bytes if "nvme" in plan.offload.places else 0,
        checkpoint_bytes=checkpoint_bytes(plan),
        communication_bytes=communication_of(plan).total_bytes,
    )
