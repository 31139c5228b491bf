"""What the optimizer keeps between steps, and what it needs during one."""

from fitune.estimate.parameters import embedding_parameters, trained_parameters
from fitune.spec.plan import AdamW, AdamW8bit, Optimizer, Plan, Sgd, trains_every_weight
from fitune.units import MIB

MASTER_BUCKET_BYTES = 64 * MIB
"""fp32 gradients exist for at most this many bytes of masters at a time (engine/optimizers.py)."""


def states_per_parameter(optimizer: Optimizer) -> int:
    """AdamW keeps two moments (Kingma & Ba, arXiv 1412.6980, algorithm 1), momentum SGD one, SGD none."""
    match optimizer:
        case AdamW() | AdamW8bit():
            return 2
        case Sgd(momentum=momentum):
            return 1 if momentum > 0 else 0


def master_bytes(plan: Plan) -> int:
    """4 · P_trained: the fp32 copy the optimizer works on under bf16-master and fp16, else nothing.

    With it, AdamW makes the K = 4 + 4 + 4 = 12 bytes per parameter of ZeRO (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 3.1); 2 + 2 + 12 = 16 with weight and gradient.
    """
    return 4 * trained_parameters(plan) if plan.precision.has_master else 0


def optimizer_bytes(plan: Plan) -> int:
    """states · P_trained · (4 with masters, else e): a state has the type of what is stepped."""
    width = 4 if plan.precision.has_master else plan.precision.compute_bytes
    return states_per_parameter(plan.optimizer) * trained_parameters(plan) * width


def update_temporaries_bytes(plan: Plan) -> int:
    """What the update adds to gradients and states at its worst moment.

    torch's fused kernels need nothing, and clipping is in place. With masters, fp32 gradients are made for a
    bucket of at most 64 MiB (at least one parameter), and each 16-bit gradient is dropped once converted: a
    full bucket adds 4 and gives back 2 bytes per parameter. The first parameter of a full fine-tune is the
    embedding: 4·V·h before its gradient is dropped, alone in its bucket when it is large; the last one, of the
    same size in a small model's only bucket, is still to be dropped when all others are: + 2·V·h.
    """
    if not plan.precision.has_master:
        return 0
    bucket = min(MASTER_BUCKET_BYTES, 4 * trained_parameters(plan))
    half_converted = bucket // 2
    if trains_every_weight(plan.tuning):
        table = embedding_parameters(plan.model)
        last = 2 * table if bucket < MASTER_BUCKET_BYTES and not plan.model.tied_embeddings else 0
        return max(half_converted + last, 4 * table)
    return half_converted
