"""Where gradients rest, and how many are whole at once, by sharding and tuning.

A gradient is born whole in backward. Then it stays (one device, DDP, ZeRO-1), is divided (ZeRO-2 and 3), goes to
the host (offloaded optimizer) or is used on the spot (LOMO, and any optimizer that steps in backward).
"""

from fitune.estimate.parameters import gradients_bytes
from fitune.estimate.shares import (
    accumulates_whole,
    gradients_are_divided,
    reduce_width,
    trained_share,
    uses_deepspeed,
    uses_fsdp,
)
from fitune.spec.plan import Ddp, Lomo, Plan, Single, updates_in_backward


def resting_gradient_bytes(plan: Plan) -> int:
    """All gradients on the device once backward is through: whole, the rank's share, or none."""
    if updates_in_backward(plan.tuning) or gradients_go_to_the_host(plan):
        return 0
    if gradients_are_divided(plan):
        return trained_share(plan) * plan.precision.compute_bytes
    if accumulates_whole(plan):
        return gradients_bytes(plan) // plan.precision.compute_bytes * reduce_width(plan)
    return gradients_bytes(plan)


def update_gradient_bytes(plan: Plan) -> int:
    """What is left of them for the update: FSDP2's are divided by then at every stage."""
    if uses_fsdp(plan) and not updates_in_backward(plan.tuning) and not gradients_go_to_the_host(plan):
        return trained_share(plan) * plan.precision.compute_bytes
    return resting_gradient_bytes(plan)


def root_gradients_wait(plan: Plan) -> bool:
    """True if head and final norm keep whole gradients until the embedding's is made, although others do not.

    FSDP2 sums its root group last; a head that is stepped in backward must wait when it is the embedding too.
    """
    if updates_in_backward(plan.tuning) and not uses_fsdp(plan):
        return plan.model.tied_embeddings
    return uses_fsdp(plan) and (gradients_are_divided(plan) or _adds_up_wider(plan))


def stepping_bytes(plan: Plan, elements: int) -> int:
    """4 per element of a 16-bit parameter that is stepped in backward, beside the gradient.

    AdaLomo's step in fp32, or the gradient of an fp32 master. An fp32 gradient becomes the step itself, and without
    masters the other rules use it as it is (engine/fused_rules.py).
    """
    if not updates_in_backward(plan.tuning) or plan.precision.compute_bytes == 4:
        return 0
    in_fp32 = plan.tuning.adaptive if isinstance(plan.tuning, Lomo) else plan.precision.has_master
    return 4 * elements if in_fp32 else 0


def gradients_always_exist(plan: Plan) -> bool:
    """DDP's are views of its buckets, which are never freed (gradient_as_bucket_view; torch/csrc reducer.cpp).

    Without views its 25 MiB buckets would be a second copy of all gradients.
    """
    return isinstance(plan.sharding, Ddp)


def one_gradient_at_a_time(plan: Plan) -> bool:
    """True if a fresh gradient is added, copied or used up before the next one is made.

    So from the second micro-batch on, into DDP's and DeepSpeed's buckets, and where they are stepped in backward.
    FSDP2 reduces a block's gradients together when the last of them is there (_fsdp_param_group.py, post_backward);
    to the host they go by blocks too.
    """
    if uses_fsdp(plan) and (gradients_are_divided(plan) or _adds_up_wider(plan)):
        return False
    if gradients_go_to_the_host(plan) and not updates_in_backward(plan.tuning) and not uses_deepspeed(plan):
        return False
    if plan.batch.accumulation > 1 or updates_in_backward(plan.tuning):
        return True
    return not isinstance(plan.sharding, Single) and not uses_fsdp(plan)


def _adds_up_wider(plan: Plan) -> bool:
    """True if whole gradients add up in fp32 beside fresh 16-bit ones.

    _fsdp_param.py, to_accumulated_grad_if_needed.
    """
    return accumulates_whole(plan) and reduce_width(plan) > plan.precision.compute_bytes


def gradients_go_to_the_host(plan: Plan) -> bool:
    """With an offloaded optimizer, block by block, unless all ranks sum them on the device first."""
    alone = isinstance(plan.sharding, Single)
    return plan.offload.optimizer != "device" and (alone or gradients_are_divided(plan))


def leaves_after_the_loss(plan: Plan) -> bool:
    """True if the head's gradient is on its way to the host while the final norm goes back."""
    return isinstance(plan.sharding, Single) and gradients_go_to_the_host(plan)
