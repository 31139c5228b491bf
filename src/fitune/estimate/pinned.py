"""Host memory that torch's own allocator pins, for FSDP2's copies of gradients and for all that DeepSpeed keeps there.

It takes powers of two and keeps what is freed (aten/src/ATen/core/CachingHostAllocator.h). Everything else is pinned in
rooms of fitune's own, which are as large as what is in them (models/host.py).
"""

from collections import Counter
from collections.abc import Iterator

from fitune.estimate.division import num_shares, trained_share, uses_deepspeed, uses_fsdp, zero_stage
from fitune.estimate.parameters import base_bytes, weights_away_bytes
from fitune.estimate.states import sub_groups_of
from fitune.spec.model.tensors import ParameterTensor, adapter_tensors, base_tensors, trained_tensors
from fitune.spec.plan import Lora, Plan, updates_in_backward
from fitune.units import power_of_two


def gradient_copies_bytes(plan: Plan) -> int:
    """Σ 2^⌈log₂(e · share)⌉ over what is trained: FSDP2's copies of a backward's gradients, beside their sums."""
    if not uses_fsdp(plan) or plan.offload.optimizer == "device":
        return 0
    e, parts = plan.precision.compute_bytes, num_shares(plan)
    return sum(t.count * power_of_two(e * t.share(parts)) for t in trained_tensors(plan))


def deepspeed_buffers_bytes(plan: Plan) -> int:
    """Bytes that DeepSpeed pins on a rank beyond weights, masters and gradients: what rounding to powers of two adds,
    and second copies.

    Rooms of trained weights are let go when these are in one buffer; what is pinned later takes those of its size. To
    4 bytes those of full fine-tuning over two ranks on the null GPU (DeepSpeed 0.19.8).
    """
    if not uses_deepspeed(plan):
        return 0
    rooms, counted, let_go, later = 0, 0, Counter[int](), Counter[int]()
    if plan.offload.optimizer == "cpu":
        below = zero_stage(plan) < 3
        later.update(map(power_of_two, _below_stage_3(plan) if below else _stage_3(plan)))
        rooms += _sums_bytes(plan) if zero_stage(plan) == 2 else 0
        counted += (8 if below else 4) * trained_share(plan)  # of stage 3 the masters are not pinned
    if plan.offload.parameters == "cpu":
        e, parts = plan.precision.compute_bytes, num_shares(plan)
        for t in base_tensors(plan.model):
            let_go[power_of_two(-(-base_bytes([t], plan) // (t.count * parts)))] += t.count
        if updates_in_backward(plan.tuning) or isinstance(
            plan.tuning, Lora
        ):  # LOMO needs none of its optimizers
            rooms, let_go = rooms + _sum(let_go), Counter()
        for t in adapter_tensors(plan):
            let_go[power_of_two(e * -(-t.elements // parts))] += t.count
        if not updates_in_backward(plan.tuning):
            rooms += sum(power_of_two(e * _share(plan, group)) for group in _groups(plan))
        counted += weights_away_bytes(plan)
    return max(0, rooms + _sum(let_go | later) - counted)


def _sum(rooms: Counter[int]) -> int:
    return sum(size * count for size, count in rooms.items())


def _below_stage_3(plan: Plan) -> Iterator[int]:
    """Masters and gradients in fp32, new weights in 16 bit, and the largest tensor whole (stage_1_and_2.py)."""
    e, parts = plan.precision.compute_bytes, num_shares(plan)
    for group in _groups(plan):
        share = -(-sum(t.elements * t.count for t in group) // parts)
        yield from (4 * share, 4 * share, e * share)
    yield e * max(t.elements for t in trained_tensors(plan))


def _sums_bytes(plan: Plan) -> int:
    """A rank's gradients between micro-batches at stage 2, each tensor whole and pinned by itself (stage_1_and_2.py).

    A tensor that two ranks share is whole on both; it is counted once.
    """
    if plan.batch.accumulation == 1:
        return 0
    e = plan.precision.compute_bytes
    every = sum(t.count * power_of_two(e * t.elements) for t in trained_tensors(plan))
    return -(-every // num_shares(plan))


def _stage_3(plan: Plan) -> Iterator[int]:
    """Gradients of the share in 16 bit, and in fp32 by sub-groups (stage3.py)."""
    groups = sub_groups_of(plan)
    yield plan.precision.compute_bytes * sum(groups)
    yield from (4 * group for group in groups)


def _groups(plan: Plan) -> list[list[ParameterTensor]]:
    """Trained tensors as the optimizer has them: those that take weight decay, and the others."""
    tensors = trained_tensors(plan)
    both = [[t for t in tensors if t.is_matrix is matrices] for matrices in (True, False)]
    return [group for group in both if group]


def _share(plan: Plan, group: list[ParameterTensor]) -> int:
    return sum(t.count * -(-t.elements // num_shares(plan)) for t in group)
