"""Bytes of one checkpoint on disk, over all ranks."""

from fitune.estimate.parameters import trained_parameters
from fitune.estimate.states import (
    adalomo_state_bytes,
    eight_bit_state_bytes,
    has_masters,
    states_per_parameter,
)
from fitune.spec.plan import AdamW8bit, Lomo, Plan


def checkpoint_bytes(plan: Plan) -> int:
    """P_trained · (e + 4 with masters) + states: what the next step depends on (train/resume.py).

    Frozen weights are not in it, and nothing is written twice however it is divided.
    """
    trained = trained_parameters(plan)
    weights = trained * (plan.precision.compute_bytes + (4 if has_masters(plan) else 0))
    return weights + _state_bytes(plan, trained)


def _state_bytes(plan: Plan, trained: int) -> int:
    if isinstance(plan.tuning, Lomo):
        return adalomo_state_bytes(plan) if plan.tuning.adaptive else 0
    if isinstance(plan.optimizer, AdamW8bit) and plan.offload.optimizer == "device":
        return eight_bit_state_bytes(plan)
    width = 4 if has_masters(plan) else plan.precision.compute_bytes
    return states_per_parameter(plan.optimizer) * trained * width
