"""Work of one token in one block of transformers' eager code: products, bytes moved between them, operations.

Every elementwise operation reads its inputs from memory and writes its result. The counts below are of transformers 5
and were taken operation by operation with a dispatch mode on CPU (tests/estimate/test_eager_traffic.py); e is the
bytes of an element of the compute type, and a product's own operands are not in them.
"""

from fitune.values.model.block_profile import Pass
from fitune.values.model.model_spec import Linear, ModelSpec
from fitune.values.model.traits import ACTIVATIONS, has_scores
from fitune.values.plan import Lora, Plan

THINNESS = 32
"""A product of rank r takes as long as one of r + 32 at full rate: vector units and tensor cores work in tiles. Ranks
of 8, 16 and 64 took as long as 48, 33 and 76 on an AVX2 core (2,048 tokens, forward and backward together)."""


EXPERT_TILE = 128
"""Rows of a tile of a grouped product on a GPU (CUTLASS's usual threadblock). Routing is taken to be even; where it is
not, products of experts are smaller still. Not measured by us."""


def block_passes(plan: Plan, *, has_adapters: bool = True) -> tuple[Pass, Pass]:
    """Forward and backward of one block: sums over the linears and over what lies between them.

    An adapter's output is scaled and added: 5e per output, and 2e backward; its input gradient joins the base's: 3e.
    Its products are thin: what they read or write of inputs and outputs, 1e of each forward and 2e backward, counts
    as moved.
    """
    model, tuning, e = plan.model, plan.tuning, plan.precision.compute_bytes
    lora = tuning if isinstance(tuning, Lora) else None
    base, adapters, forward_moved, backward_moved = 0.0, 0, 0, 0
    adapted = 0
    for linear in model.linears:
        base += linear.in_features * linear.out_features * linear.active_copies * _idle_rows(plan, linear)
        if lora and has_adapters and linear.is_target(lora.targets):
            adapted += 1
            times = linear.active_copies
            adapters += (lora.rank + THINNESS) * (linear.in_features + linear.out_features) * times
            forward_moved += (6 * linear.out_features + linear.in_features) * times
            backward_moved += (4 * linear.out_features + 5 * linear.in_features) * times
            if lora.dropout > 0:
                forward_moved += 3 * linear.in_features
                backward_moved += 3 * linear.in_features
    between, between_back = elementwise_passes(model, element_bytes=e, fused=plan.kernels == "liger")
    count, gradients, scores = len(model.linears), 2 if lora is None else 1, _scores(plan)
    forward = Pass(
        flops=2.0 * (base + adapters),
        bytes=between.bytes + e * forward_moved + scores,
        products=count + 2 * adapted,
        operations=between.operations + 2 * adapted,
    )
    backward = Pass(
        flops=2.0 * (gradients * base + 2 * adapters),
        bytes=between_back.bytes + e * backward_moved + scores,
        products=gradients * count + 4 * adapted,
        operations=between_back.operations + 2 * adapted,
    )
    return forward, backward


def _idle_rows(plan: Plan, linear: Linear) -> float:
    """(r + 64) / r for the products of experts with r rows each: of the last tile of an expert half is idle.

    1 on a processor and for a linear that all tokens go through.
    """
    if linear.copies == 1 or plan.hardware.gpu.is_cpu:
        return 1.0
    rows = plan.batch.micro_batch_tokens * linear.active_copies / linear.copies
    return 1 + EXPERT_TILE / 2 / rows


def _norm(model: ModelSpec, e: int, *, fused: bool) -> tuple[float, float, int, int]:
    """Bytes per element of a norm, forward and backward, and its operations. LayerNorm is one kernel: 2e and 3e; so is
    Liger's: 2e and 4e. RMSNorm is written out: 7 and 23 moves of fp32 under fp32; in 16 bit 36 and 94 bytes, 40 and 107
    where the weight multiplies in fp32 (Gemma)."""
    if fused or model.norm_type == "layer":
        return 2 * e, (4 if fused else 3) * e, 1, 2
    if e == 4:
        return 28, 92, 6, 14
    return (40, 107, 9, 17) if model.scales_norms_in_fp32 else (36, 94, 8, 16)


def elementwise_passes(model: ModelSpec, *, element_bytes: int, fused: bool) -> tuple[Pass, Pass]:
    """Bytes and operations between a block's products, without adapters, forward and backward.

    Norms; 3e·h for each of two sums with the residual stream, and in backward for each gradient that joins it
    (6 in all: both sums, q, k and v, gate and up); as much each way for a dropout before each sum; 10e and 17e
    for queries and keys turned to their positions; the MLP's activation. Liger's kernels turn them in place, 2e each
    way, and read gate and up once: 3e·f and 5e·f.
    """
    e, h, width = element_bytes, model.hidden_size, model.q_dim + model.kv_dim
    forward, backward, operations, operations_back = _norm(model, e, fused=fused)
    has_qk_norm = model.qk_norm != "none"
    norms = model.norms_per_block + 2 * has_qk_norm
    normed = model.norms_per_block * h + width * has_qk_norm
    turned = 0 if model.learned_positions else width
    turning = (2, 2) if fused else (10, 17)
    activation = _activation(model)
    if fused and not model.num_experts:
        activation = 3.0 * model.intermediate_size, 5.0 * model.intermediate_size
    dropped = 3 * h * _residual_dropouts(model)
    others = _operations(model, fused=fused)
    return (
        Pass(
            bytes=forward * normed + e * (dropped + 6 * h + turning[0] * turned + activation[0]),
            operations=others[0] + norms * operations,
        ),
        Pass(
            bytes=backward * normed + e * (dropped + 18 * h + turning[1] * turned + activation[1]),
            operations=others[1] + norms * operations_back,
        ),
    )


def _operations(model: ModelSpec, *, fused: bool) -> tuple[int, int]:
    """Besides norms: 10 and 14 turn queries and keys; sums, attention and a gated activation of one kernel take 5
    and 12, 1 and 2 of these the gated product, 18 more each for a mixture of experts; then what the activation takes
    beyond one. Liger's kernels are one each: for the positions, and for a gated product that takes 2 and 3 operations
    otherwise. Dropout of what joins the residual stream is one each."""
    forward, backward = 5, 12
    if fused:
        forward, backward = (6, 13) if model.num_experts else (5, 11)
    elif not model.learned_positions:
        forward, backward = forward + 10, backward + 14
    forward, backward = forward + _residual_dropouts(model), backward + _residual_dropouts(model)
    if model.num_experts:
        return forward + 18, backward + 18
    own, own_back = ACTIVATIONS[model.activation].operations
    if model.mlp_type == "plain":
        forward, backward = forward - 1, backward - 2
    return forward + own - 1, backward + own_back - 1


def _residual_dropouts(model: ModelSpec) -> int:
    return (model.dropout.attention_output > 0) + (model.dropout.mlp_output > 0)


def _activation(model: ModelSpec) -> tuple[float, float]:
    """Elements moved per token: those of the activation, 2·f and 3·f where it is one kernel; gated 3·f and 6·f more.

    A mixture of experts also gathers and weighs a copy of the token for each expert it visits: 6·h and 4·f + 15·h
    more for each.
    """
    forward, backward = ACTIVATIONS[model.activation].reads_and_writes
    f = model.intermediate_size
    if model.num_experts:
        h, copies = model.hidden_size, model.experts_per_token
        return copies * ((forward + 3.0) * f + 6 * h), copies * ((backward + 10.0) * f + 15 * h)
    if model.mlp_type == "gated":
        forward, backward = forward + 3, backward + 6
    return float(forward * f), float(backward * f)


def _scores(plan: Plan) -> float:
    """32 bytes for each score where attention is written out: mask, fp32 softmax and copies, forward and backward.

    56 with dropout, whose noise is written, scaled and multiplied with.
    """
    if not has_scores(plan):
        return 0.0
    dropped = 24.0 if plan.model.dropout.attention else 0.0
    return (32.0 + dropped) * plan.model.num_heads * plan.batch.seq_len
