"""Everything the arithmetic says about one plan."""

from fitune.estimate.memory import predict_memory
from fitune.estimate.overhead import usable_bytes
from fitune.estimate.shape import largest_batch
from fitune.estimate.time import predict_step_time
from fitune.spec.plan import Plan
from fitune.spec.reports import Estimate


def predict(plan: Plan) -> Estimate:
    """Memory and time of the largest batch the plan allows, on one device."""
    shape = largest_batch(plan)
    time = predict_step_time(plan, shape)
    return Estimate(
        memory=predict_memory(plan, shape),
        usable_bytes=usable_bytes(plan.hardware),
        time=time,
        tokens_per_second=shape.tokens * plan.batch.accumulation / time.step_seconds,
    )
