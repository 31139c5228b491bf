"""Bytes of gradients, fp32 masters and optimizer states, for all that is trained.

A gradient is born whole in backward. Then it stays (one device, DDP, ZeRO-1), is divided (ZeRO-2 and 3), goes to
the host (offloaded optimizer) or is used on the spot (LOMO, and any optimizer that steps in backward).
"""

from fitune.estimate.division import (
    accumulates_whole,
    gradients_are_divided,
    num_shares,
    reduce_width,
    trained_share,
    uses_deepspeed,
    uses_fsdp,
    zero_stage,
)
from fitune.estimate.parameters import (
    blocks_trained,
    gradients_bytes,
    trained_parameters,
)
from fitune.values.choices import ADALOMO_ROWS, EIGHT_BIT_BLOCK, EIGHT_BIT_LEAST, MASTER_BUCKET_BYTES
from fitune.values.counts import ParameterTensor, base_tensors, trained_in_order, trained_tensors
from fitune.values.deepspeed import deepspeed_config, sub_groups
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    Ddp,
    Lomo,
    Lora,
    Optimizer,
    Plan,
    Sgd,
    Single,
    trains_head,
    updates_in_backward,
)


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
    """Bytes of the gradients that the update reads: FSDP2's and DeepSpeed's are divided by then at every stage."""
    resting = resting_gradient_bytes(plan)
    return trained_share(plan) * plan.precision.compute_bytes if resting and zero_stage(plan) else resting


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
    masters the other rules use it as it is (engine/fused_rules.py). AdaLomo: + 2 · 4 for every 512 elements, norms of a
    matrix's columns in parts, as they are and put together.
    """
    if not updates_in_backward(plan.tuning):
        return 0
    in_fp32 = 4 * elements if plan.precision.compute_bytes < 4 else 0
    if isinstance(plan.tuning, Lomo):
        return in_fp32 + 2 * 4 * elements // ADALOMO_ROWS if plan.tuning.adaptive else 0
    return in_fp32 if plan.precision.has_master else 0


def gradients_always_exist(plan: Plan) -> bool:
    """DDP's are views of its buckets, which are never freed (gradient_as_bucket_view; torch/csrc reducer.cpp).

    Without views its 25 MiB buckets would be a second copy of all gradients. DeepSpeed's stage 3 has a flat tensor for
    those of the share (grad_partitions_flat_buffer), on the host when the optimizer is there.
    """
    flat = uses_deepspeed(plan) and zero_stage(plan) == 3 and not updates_in_backward(plan.tuning)
    return isinstance(plan.sharding, Ddp) or (flat and plan.offload.optimizer == "device")


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
    """True with an offloaded optimizer: they go block by block, unless all ranks sum them on the device first."""
    alone = isinstance(plan.sharding, Single)
    return plan.offload.optimizer != "device" and (alone or gradients_are_divided(plan))


SUB_GROUP = 1_000_000_000
"""DeepSpeed's default sub_group_size: elements that stage 3 steps at a time."""


def sub_groups_of(plan: Plan, size: int = 0) -> list[int]:
    """Elements of a rank's share that DeepSpeed steps at once: its sub-groups at stage 3, else all.

    ``size``: another sub_group_size than that of the plan's own ds_config.json.
    """
    if not uses_deepspeed(plan) or zero_stage(plan) < 3:
        return [trained_share(plan)]
    return sub_groups(plan, size or deepspeed_config(plan)["zero_optimization"]["sub_group_size"])


def states_per_parameter(optimizer: Optimizer) -> int:
    """AdamW keeps two moments (Kingma & Ba, arXiv 1412.6980, algorithm 1), momentum SGD one, SGD none."""
    match optimizer:
        case AdamW() | AdamW8bit():
            return 2
        case Sgd(momentum=momentum):
            return 1 if momentum > 0 else 0


def master_bytes(plan: Plan) -> int:
    """4 · P_trained / N: the fp32 copy the optimizer works on under bf16-master and fp16, else nothing.

    N is 1, or the shares of ZeRO; the largest share counts. On the device: nothing when the optimizer is offloaded.

    With it, AdamW makes the K = 4 + 4 + 4 = 12 bytes per parameter of ZeRO (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 3.1); 2 + 2 + 12 = 16 with weight and gradient.
    """
    return 4 * trained_share(plan) if has_masters(plan) and plan.offload.optimizer == "device" else 0


def has_masters(plan: Plan) -> bool:
    """True if the precision has fp32 masters, the optimizer is on the host, or DeepSpeed divides into fp32 copies.

    Never with LOMO, which updates the weights themselves. deepspeed/runtime/zero/stage_1_and_2.py.
    """
    if isinstance(plan.tuning, Lomo):
        return False
    return plan.precision.has_master or plan.offload.optimizer != "device" or uses_deepspeed(plan)


def optimizer_bytes(plan: Plan) -> int:
    """states · P_trained / N · (4 with masters, else e): a state has the type of what is stepped.

    8 bit: 1 byte and a scale, whatever is stepped. AdaLomo: a factored moment. Nothing when it is offloaded.
    """
    if isinstance(plan.tuning, Lomo):
        return adalomo_state_bytes(plan) if plan.tuning.adaptive else 0
    if plan.offload.optimizer != "device":
        return 0
    if isinstance(plan.optimizer, AdamW8bit):
        return eight_bit_state_bytes(plan)
    width = 4 if has_masters(plan) else plan.precision.compute_bytes
    return states_per_parameter(plan.optimizer) * trained_share(plan) * width


def eight_bit_state_bytes(plan: Plan) -> int:
    """2 · (1 + 4/256) per element: two states of 1 byte and an fp32 scale per block of 256.

    Tensors under 4096 elements keep 2 · 4 bytes. Dettmers et al. 2022, arXiv 2110.02861; sizes after division.
    """
    parts, total = num_shares(plan), 0
    for t in trained_tensors(plan):
        elements = t.share(parts)
        scales = 4 * -(-elements // EIGHT_BIT_BLOCK)
        total += t.count * 2 * (4 * elements if elements < EIGHT_BIT_LEAST else elements + scales)
    return total


def adalomo_state_bytes(plan: Plan) -> int:
    """4 · (out + in) per matrix, 4 · n per vector: the second moment as the product of a row and a column.

    Lv et al. 2023, arXiv 2310.10195, section 3.2. The rows are divided with the weights, the columns are not.
    Experts are matrices each.
    """
    parts = num_shares(plan)
    return sum(4 * t.count * _factors(t, parts) for t in base_tensors(plan.model))


def _factors(tensor: ParameterTensor, parts: int) -> int:
    rows = -(-tensor.rows // parts)
    if tensor.linear is not None and tensor.linear.copies > 1 and tensor.is_matrix:
        return rows * (tensor.linear.out_features + tensor.linear.in_features)
    return rows + (tensor.row_elements if tensor.is_matrix else 0)


def update_temporaries_bytes(plan: Plan) -> int:
    """Bytes that the update adds to gradients and states at its worst moment.

    torch's fused kernels need nothing, and clipping is in place. With masters, fp32 gradients are made for a
    bucket of at most 64 MiB (at least one parameter), and each 16-bit gradient is dropped once converted: adapters,
    which are small, take half of the first bucket.
    """
    if updates_in_backward(plan.tuning) or plan.offload.optimizer != "device":
        return 0
    if uses_deepspeed(plan):
        return deepspeed_step_bytes(plan)
    if not plan.precision.has_master:
        return 0
    if num_shares(plan) > 1 or isinstance(plan.sharding, Ddp):
        return _divided_step_bytes(plan)
    if isinstance(plan.tuning, Lora) and not plan.tuning.modules_to_save:
        return min(MASTER_BUCKET_BYTES, 4 * trained_parameters(plan)) // 2
    return _converted_bytes(plan)


def _converted_bytes(plan: Plan) -> int:
    """The most that fp32 copies of gradients are more than the 16-bit ones gone by then, bucket by bucket, in the order
    in which the model holds its parameters (engine/optimizers.py).

    4·n of a tensor of n − 2 for each weight before it: of the embedding, or of the first block's stack of experts.
    """
    most = dropped = copies = 0
    for tensor in trained_in_order(plan):
        for _ in range(tensor.count):
            if copies and copies + 4 * tensor.elements > MASTER_BUCKET_BYTES:
                copies = 0
            copies += 4 * tensor.elements
            most = max(most, copies - dropped)
            dropped += 2 * tensor.elements
    return most


def deepspeed_step_bytes(plan: Plan, sub_group_size: int = 0) -> int:
    """(4 + e) · P_trained / N, 4 in fp32: the share's gradients, made flat and then fp32.

    Stage 3 converts a sub-group at a time. step() in deepspeed/runtime/zero/stage_1_and_2.py and stage3.py.
    """
    e = plan.precision.compute_bytes
    return (4 + (e if e < 4 else 0)) * max(sub_groups_of(plan, sub_group_size))


def _divided_step_bytes(plan: Plan) -> int:
    """A bucket of fp32 gradients, at least one tensor's share. DDP's gradients are views of its buckets: none goes.

    FSDP2's are views of one buffer for each group, which goes with the last of them. When one bucket takes all, only
    the last group's is left: the root's, or a block's under LoRA.
    """
    parts = num_shares(plan)
    share = trained_share(plan)
    if uses_fsdp(plan) and 4 * share <= MASTER_BUCKET_BYTES:
        ends_with_root = trains_head(plan.tuning)
        last = [t for t in trained_tensors(plan) if t.in_block is not ends_with_root]
        left = sum(t.share(parts) * t.count for t in last) // (1 if ends_with_root else blocks_trained(plan))
        return 4 * share - plan.precision.compute_bytes * (share - left)
    largest = max(t.share(parts) for t in trained_tensors(plan))
    return max(min(MASTER_BUCKET_BYTES, 4 * share), 4 * largest)
