"""What one rank holds when the states are divided: the share of the rank that holds most."""

from collections.abc import Iterable

from fitune.estimate.tensors import (
    ParameterTensor,
    base_tensors,
    is_quantised,
    packed_bytes,
    stored_bytes,
    trained_tensors,
)
from fitune.spec.plan import Ddp, Dense, Plan, Quantiser, Single, Zero, base_of


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
    return isinstance(plan.sharding, Zero) and plan.sharding.backend == "fsdp"


def uses_deepspeed(plan: Plan) -> bool:
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
    """As soon as a block has them."""
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


def trained_share(plan: Plan) -> int:
    """Trained elements whose masters and optimizer states one rank holds and steps."""
    return share_elements(trained_tensors(plan), plan)


def base_bytes(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Whole tensors of the base as they are stored: packed where quantised, else in the compute type."""
    base, e = base_of(plan), plan.precision.compute_bytes
    return sum(t.count * stored_bytes(t.elements, _stored_as(t, base), element_bytes=e) for t in tensors)


def gathered_bytes(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """What of them is sent around when they are divided: all but the scales of packed ones, which no rank gave away."""
    base, e = base_of(plan), plan.precision.compute_bytes
    return sum(t.count * packed_bytes(t.elements, _stored_as(t, base), element_bytes=e) for t in tensors)


def base_share_bytes(plan: Plan) -> int:
    """The base's weights on the rank that holds most: packed words are divided like one long row, scales are not."""
    base, e, parts = base_of(plan), plan.precision.compute_bytes, num_shares(plan)
    tensors = base_tensors(plan.model)
    packed = [t for t in tensors if _stored_as(t, base) is not _DENSE]
    dense = [t for t in tensors if t not in packed]
    words = sum(t.count * -(-packed_bytes(t.elements, base, element_bytes=e) // parts) for t in packed)
    return words + scale_bytes(plan) + share_elements(dense, plan) * e


def scale_bytes(plan: Plan) -> int:
    """All that packed matrices hold beside their words."""
    if isinstance(base_of(plan), Dense):
        return 0
    tensors = base_tensors(plan.model)
    return base_bytes(tensors, plan) - gathered_bytes(tensors, plan)


_DENSE = Dense()


def _stored_as(tensor: ParameterTensor, base: Dense | Quantiser) -> Dense | Quantiser:
    return base if tensor.linear is not None and is_quantised(tensor.linear, base) else _DENSE
