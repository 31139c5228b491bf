"""Everything the arithmetic says about one plan."""

from fitune.estimate.memory import predict_memory
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.shape import largest_batch
from fitune.estimate.time import predict_step_time
from fitune.spec.plan import Plan
from fitune.spec.reports import Estimate
from fitune.spec.shape import BatchShape


def predict(plan: Plan, *, largest: BatchShape | None = None, usual: BatchShape | None = None) -> Estimate:
    """Memory of the ``largest`` micro-batch and time of the ``usual`` one, on one device.

    Without them, of the largest the plan allows: what has to fit before the data is known.
    """
    worst = largest_batch(plan)
    usual = usual or worst
    time = predict_step_time(plan, usual)
    return Estimate(
        memory=predict_memory(plan, largest or worst),
        usable_bytes=usable_bytes(plan.hardware),
        time=time,
        tokens_per_second=usual.tokens * plan.batch.accumulation / time.step_seconds,
    )
