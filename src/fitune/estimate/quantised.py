"""Bytes of a frozen base in few bits, and what it takes to multiply with one.

Quantised are the linears of the blocks that are modules of their own. Embedding, head, norms and biases stay in
the compute type, and so do routers and experts, which transformers holds as bare parameters.
"""

from fitune.spec.model import Linear
from fitune.spec.plan import Dense, Hqq, Lora, Nf4, Plan

NF4_BLOCK = 64
"""Weights per absolute maximum (bitsandbytes' default; Dettmers et al. 2023, arXiv 2305.14314, section 3)."""
SCALE_BLOCK = 256
"""First-level scales per second-level scale with double quantisation (same section)."""
SCALE_TABLE_BYTES = 256 * 4 + 4
"""The values that an 8-bit scale can have and the scales' mean, beside every matrix (models/nf4.py)."""
HQQ_PACKING = {8: (1, 1), 4: (2, 1), 3: (10, 4), 2: (4, 1)}
"""Bits -> weights per packed word, bytes of the word: ten 3-bit weights share an int32 (hqq.core.bitpack)."""


def base_of(plan: Plan) -> Dense | Nf4 | Hqq:
    return plan.tuning.base if isinstance(plan.tuning, Lora) else Dense()


def is_quantised(linear: Linear, base: Dense | Nf4 | Hqq) -> bool:
    return linear.adaptable and not isinstance(base, Dense)


def nf4_bytes(weights: int, *, double_quant: bool) -> int:
    """n/2 packed + 4 per 64 weights; with double quantisation 1 per 64 + 4 per 64·256: 4.127 bit per weight.

    What a matrix holds besides, whatever its size, is SCALE_TABLE_BYTES.
    """
    scales = -(-weights // NF4_BLOCK)
    scale_bytes = scales + 4 * -(-scales // SCALE_BLOCK) if double_quant else 4 * scales
    return -(-weights // 2) + scale_bytes


def hqq_bytes(weights: int, *, bits: int, group_size: int, element_bytes: int) -> int:
    """Packed words + a scale and a zero point per group in the compute type: bits/8 (3 bit: 0.4) + 2·e/group each."""
    per_word, word = HQQ_PACKING[bits]
    return -(-weights // per_word) * word + 2 * element_bytes * -(-weights // group_size)


def stored_bytes(weights: int, base: Dense | Nf4 | Hqq, *, element_bytes: int) -> int:
    """One matrix as the device holds it."""
    match base:
        case Dense():
            return weights * element_bytes
        case Nf4(double_quant=double):
            return nf4_bytes(weights, double_quant=double) + SCALE_TABLE_BYTES * double
        case Hqq(bits=bits, group_size=group):
            return hqq_bytes(weights, bits=bits, group_size=group, element_bytes=element_bytes)


def packed_bytes(weights: int, base: Dense | Nf4 | Hqq, *, element_bytes: int) -> int:
    """One matrix's words without what scales them: the parameter, of which sharding makes shares.

    Scales are buffers, which every rank holds whole (models/quantised.py, engine/fsdp.py).
    """
    match base:
        case Dense():
            return weights * element_bytes
        case Nf4():
            return -(-weights // 2)
        case Hqq(bits=bits):
            per_word, word = HQQ_PACKING[bits]
            return -(-weights // per_word) * word


def dequantisation_workspace_bytes(*, in_features: int, out_features: int, element_bytes: int) -> int:
    """e·out·in: the matrix in the compute type while it is multiplied, forward and backward alike.

    Nothing of it is kept; the largest linear decides (bitsandbytes MatMul4Bit; hqq dequantises the same way).
    """
    return in_features * out_features * element_bytes
