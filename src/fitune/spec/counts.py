"""Exact counts: parameters, as sums over the linears of one block, and the FLOPs that training needs.

The estimate divides FLOPs by a rate to predict time; the measurement divides them by time to get utilisation: one
definition for both. A multiply-add counts as two.
"""

from collections import Counter
from collections.abc import Sequence

from fitune.spec.choices import trains_embeddings
from fitune.spec.machines.hardware import Gpu
from fitune.spec.model.model_spec import BlockAttention, ModelSpec, ParameterCounts
from fitune.spec.model.tensors import adapters_of, base_tensors
from fitune.spec.plan import Lora, Plan, Precision, Tuning, trains_head
from fitune.spec.remembered import remembered


def rows_of_share(rows: int, shares: int, rank: int) -> tuple[int, int]:
    """The first row of ``rank``'s share and the row behind its last: shares of ⌈rows / shares⌉, the last ones smaller
    or empty, as torch divides (``Tensor.chunk``, FSDP2)."""
    size = -(-rows // shares)
    return min(rank * size, rows), min((rank + 1) * size, rows)


@remembered
def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Parameters by component: blocks × (linears + norms) + embeddings + final norm + head.

    A tied head counts once, as embeddings. ``norms`` are all parameters that are in no linear and no table. ``active``
    leaves out the experts a token does not visit.
    """
    linears = list(model.counted_linears())
    parts = {
        part: sum(count * m.parameters for m, count in linears if m.part == part)
        for part in ("attention", "mlp", "experts", "router")
    }
    embeddings = (model.vocab_size + model.learned_positions) * model.hidden_size
    head = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    head += model.vocab_size if model.head_bias else 0
    # Copies of a linear are the experts: a token does not go through those that were not chosen.
    idle = sum(count * (m.parameters // m.copies) * (m.copies - m.active_copies) for m, count in linears)
    total = sum(t.elements * t.count for t in base_tensors(model))
    norms = total - sum(parts.values()) - embeddings - head
    return ParameterCounts(**parts, norms=norms, embeddings=embeddings, head=head, active=total - idle)


@remembered
def lora_parameters(model: ModelSpec, lora: Lora) -> int:
    """Trainable parameters of LoRA: Σ rank · (in + out), + out with DoRA, over the adapted linears of adapted blocks.

    A is rank × in, B is out × rank (Hu et al. 2021, arXiv 2106.09685, section 4.1; of DoRA's norms Liu et al. 2024,
    arXiv 2402.09353, section 4.1); no bias is trained. Each expert of a stack has a pair of its own.
    """
    return sum(t.elements * t.count for t in adapters_of(model, lora))


@remembered
def adapted_blocks(model: ModelSpec, lora: Lora) -> tuple[int, ...]:
    """Numbers of the blocks with adapters, ascending: some of a hybrid's blocks may have no linear that is a target."""
    return tuple(
        index
        for index in range(model.num_layers)
        if lora.adapts(index) and any(m.is_target(lora.targets) for m in model.linears_of(index))
    )


def untouched_blocks(model: ModelSpec, tuning: Tuning) -> int:
    """Number of blocks, counted from the first, that backward does not reach: nothing before the next one trains."""
    if not isinstance(tuning, Lora) or trains_embeddings(tuning):
        return 0
    return min(adapted_blocks(model, tuning), default=0)


def model_flops(
    model: ModelSpec, tuning: Tuning, *, row_lengths: Sequence[int], supervised_tokens: int
) -> float:
    """One forward and backward over rows of these lengths. Work done twice by recompute is not counted.

    Per weight and token: 2 forward, 2 for the gradient of the input, 2 for the gradient of the weight where
    it is trained (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B). A row of n tokens attends to the pairs that each block sees (BlockAttention), none across rows. Only
    supervised tokens pass the head. Blocks that no gradient reaches go forward only.
    """
    forward_only = untouched_blocks(model, tuning)
    kinds = Counter((model.attention_of(block), block < forward_only) for block in range(model.num_layers))
    attended = sum(
        count * attention_flops_per_pair(kind) / (3 if one_way else 1) * sum(map(kind.pairs, row_lengths))
        for (kind, one_way), count in kinds.items()
    )
    products = sum(row_lengths) * _linear_flops_per_token(model, tuning)
    return products + attended + supervised_tokens * head_flops_per_token(model, tuning)


@remembered
def _linear_flops_per_token(model: ModelSpec, tuning: Tuning) -> float:
    """Forward and backward of the linears of all blocks, with their adapters; forward alone where no gradient comes."""
    lora, forward_only = isinstance(tuning, Lora), untouched_blocks(model, tuning)
    flops = 0.0
    for block in range(model.num_layers):
        for m in model.linears_of(block):
            each = 2.0 if block < forward_only else 4.0 if lora else 6.0
            flops += each * m.in_features * m.out_features * m.active_copies
            if isinstance(tuning, Lora) and tuning.adapts(block) and m.is_target(tuning.targets):
                flops += 6.0 * tuning.rank * (m.in_features + m.out_features) * m.active_copies
    return flops


def attention_flops_per_pair(attention: BlockAttention) -> float:
    """Scores and weighted values, forward (2 + 2 per head element) and twice that backward, in one block."""
    return 12.0 * attention.width


def head_flops_per_token(model: ModelSpec, tuning: Tuning) -> float:
    """FLOPs of the output head for a token, forward and backward."""
    weights = model.hidden_size * model.vocab_size
    return (6.0 if trains_head(tuning) else 4.0) * weights


def peak_flops(gpu: Gpu, precision: Precision) -> float:
    """Datasheet FLOP/s of one device in the compute type of ``precision``; 0 when it cannot."""
    match precision:
        case Precision.FP32:
            return gpu.fp32_flops
        case Precision.FP16:
            return gpu.fp16_flops
        case Precision.BF16 | Precision.BF16_MASTER:
            return gpu.bf16_flops


def has_tf32(gpu: Gpu, precision: Precision) -> bool:
    """True if there are products that TF32 changes: of fp32 numbers, on Ampere or newer."""
    return precision is Precision.FP32 and gpu.capability >= (8, 0)


def achieved_mfu(plan: Plan, row_lengths: Sequence[int], supervised_tokens: int, *, seconds: float) -> float:
    """Model FLOPs utilisation: the FLOPs the mathematics needs (recompute is not counted)
    over what the device could have done in the same time (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    0 when the device's peak is not known: a processor's is a careful guess, which many exceed.
    """
    peak = peak_flops(plan.hardware.gpu, plan.precision) * plan.hardware.num_gpus
    if peak <= 0 or seconds <= 0 or plan.hardware.gpu.is_cpu:
        return 0.0
    flops = model_flops(plan.model, plan.tuning, row_lengths=row_lengths, supervised_tokens=supervised_tokens)
    return flops / (seconds * peak)
