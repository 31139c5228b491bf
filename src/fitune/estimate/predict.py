"""Everything the arithmetic says about one plan."""

from fitune.estimate.memory import memory_of
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.shape import largest_batch
from fitune.estimate.step import describe_step
from fitune.estimate.time import step_time_of
from fitune.spec.plan import Plan
from fitune.spec.reports import Estimate


def predict(plan: Plan) -> Estimate:
    """Memory and time of the largest batch the plan allows, on one device."""
    step = describe_step(plan, largest_batch(plan))
    time = step_time_of(step)
    return Estimate(
        memory=memory_of(step),
        usable_bytes=usable_bytes(plan.hardware),
        time=time,
        tokens_per_second=step.shape.tokens * plan.batch.accumulation / time.step_seconds,
    )
