"""Floating-point operations that training needs by its mathematics, and what a device can do.

The estimate divides them by a rate to predict time; the measurement divides them by time to get
utilisation. One definition for both. A multiply-add counts as two.
"""

from collections.abc import Sequence

from fitune.spec.hardware import Gpu
from fitune.spec.model import Linear, ModelSpec
from fitune.spec.parameters import adapted_blocks, blocks_gone_back_through
from fitune.spec.plan import Full, Lomo, Lora, Precision, Tuning, trains_head


def model_flops(
    model: ModelSpec, tuning: Tuning, *, row_lengths: Sequence[int], supervised_tokens: int
) -> float:
    """One forward and backward over rows of these lengths. Work done twice by recompute is not counted.

    Per weight and token: 2 forward, 2 for the gradient of the input, 2 for the gradient of the weight where
    it is trained (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B). A row of n tokens attends to n(n+1)/2 pairs: causal, none across rows. Only supervised tokens
    pass the head. Blocks that no gradient reaches go forward only.
    """
    tokens = sum(row_lengths)
    pairs = sum(n * (n + 1) / 2 for n in row_lengths)
    forward_only = model.num_layers - blocks_gone_back_through(model, tuning)
    adapted = adapted_blocks(model, tuning) if isinstance(tuning, Lora) else model.num_layers
    base = sum(linear_flops_per_token(linear, tuning, adapted=False) for linear in model.linears)
    whole = sum(linear_flops_per_token(linear, tuning) for linear in model.linears)
    back = model.num_layers * base + adapted * (whole - base) - forward_only * base / 2
    attended = (model.num_layers - forward_only * 2 / 3) * attention_flops_per_pair(model)
    return tokens * back + pairs * attended + supervised_tokens * head_flops_per_token(model, tuning)


def linear_flops_per_token(linear: Linear, tuning: Tuning, *, adapted: bool = True) -> float:
    """Forward and backward of one linear of a block, with its adapter if it has one and the block is ``adapted``."""
    active = linear.in_features * linear.out_features * linear.active_copies
    match tuning:
        case Full() | Lomo():
            return 6.0 * active
        case Lora(rank=rank, targets=targets):
            return 4.0 * active + (
                6.0 * rank * (linear.in_features + linear.out_features)
                if adapted and linear.is_target(targets)
                else 0.0
            )


def attention_flops_per_pair(model: ModelSpec) -> float:
    """Scores and weighted values, forward (2 + 2 per head element) and twice that backward, in one block."""
    return 12.0 * model.q_dim


def head_flops_per_token(model: ModelSpec, tuning: Tuning) -> float:
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
