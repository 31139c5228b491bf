"""A plan's states divided over ranks: how many there are, what is divided, and the elements of a share."""

from collections.abc import Iterable

from fitune.values.counts import ParameterTensor, trained_tensors
from fitune.values.plan import Ddp, Plan, Single, Zero
from fitune.values.remembered import remembered_by


def num_ranks(plan: Plan) -> int:
    """Processes that train together, one per device."""
    match plan.sharding:
        case Single():
            return 1
        case Ddp() | Zero():
            return plan.hardware.num_gpus


def num_shares(plan: Plan) -> int:
    """Parts into which states are divided: all ranks, or those of one node when hybrid."""
    match plan.sharding:
        case Single() | Ddp():
            return 1
        case Zero(hybrid=hybrid):
            return plan.hardware.gpus_per_node if hybrid else plan.hardware.num_gpus


def uses_fsdp(plan: Plan) -> bool:
    """True if FSDP2 divides the states."""
    return isinstance(plan.sharding, Zero) and plan.sharding.backend == "fsdp"


def uses_deepspeed(plan: Plan) -> bool:
    """True if DeepSpeed divides the states."""
    return isinstance(plan.sharding, Zero) and plan.sharding.backend == "deepspeed"


def zero_stage(plan: Plan) -> int:
    """0 without ZeRO."""
    return plan.sharding.stage if isinstance(plan.sharding, Zero) else 0


def weights_are_divided(plan: Plan) -> bool:
    """Between two steps: by FSDP2 at every stage, by DeepSpeed at stage 3."""
    return uses_fsdp(plan) or zero_stage(plan) == 3


def accumulates_whole(plan: Plan) -> bool:
    """FSDP2's stage 1 with several micro-batches: whole gradients add up on whole weights until the last one.

    With a single micro-batch it does what stage 2 does.
    """
    return uses_fsdp(plan) and zero_stage(plan) == 1 and plan.batch.accumulation > 1


def gradients_are_divided(plan: Plan) -> bool:
    """True if a block's gradients are divided as soon as they exist."""
    return zero_stage(plan) >= 2 or (uses_fsdp(plan) and not accumulates_whole(plan))


def reduce_width(plan: Plan) -> int:
    """Bytes of an element while FSDP2 sums it: 4 when the optimizer works in fp32, else the compute type's."""
    return 4 if plan.precision.has_master else plan.precision.compute_bytes


def share_elements(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Elements of the largest share, padding included.

    FSDP2 divides the rows of every tensor: Σ ⌈rows / N⌉ · row (fully_shard, Shard(0)). DeepSpeed divides every
    tensor's elements at stage 3, Σ ⌈n / N⌉ (partition_parameters.py), and one flat buffer of all before: ⌈Σ n / N⌉.
    """
    parts = num_shares(plan)
    if parts == 1:
        return sum(t.elements * t.count for t in tensors)
    if uses_fsdp(plan):
        return sum(t.share(parts) * t.count for t in tensors)
    if zero_stage(plan) == 3:
        return sum(-(-t.elements // parts) * t.count for t in tensors)
    return -(-sum(t.elements * t.count for t in tensors) // parts)


@remembered_by("model", "tuning", "sharding", "hardware")
def trained_share(plan: Plan) -> int:
    """Trained elements whose masters and optimizer states one rank holds and steps."""
    return share_elements(trained_tensors(plan), plan)
