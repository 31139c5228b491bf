"""The accounts everybody quotes, as their authors wrote them: numbers of parameters in, bytes out.

Plans are priced by the other files, which know padding, buffers and what each backend keeps; these are what
they have to agree with (tests/laws).
"""

ADAM_K = 12
"""fp32 master, momentum and variance, 4 bytes each, per parameter. Plain SGD: 4, with momentum: 8."""


def mixed_precision_state_bytes(*, parameters, ranks, stage, k=ADAM_K):
    """(2 + 2 + K)·P, of which ZeRO-1 divides K, ZeRO-2 also the gradient's 2, ZeRO-3 all by the ranks.

    2 is a 16-bit weight, 2 its gradient, K the optimizer's. Rajbhandari et al. 2020, arXiv 1910.02054, figure 1.
    Without padding and buffers.
    """
    states = k * parameters / (ranks if stage >= 1 else 1)
    gradients = 2 * parameters / (ranks if stage >= 2 else 1)
    weights = 2 * parameters / (ranks if stage >= 3 else 1)
    return weights + gradients + states


def communicated_elements(*, parameters, stage):
    """Elements each rank sends per step of one micro-batch: 2P, and 3P at stage 3.

    All-reduce is reduce-scatter + all-gather, P each; ZeRO-1 and 2 reduce-scatter gradients and all-gather weights.
    ZeRO-3 all-gathers weights twice, for forward and for backward. Rajbhandari et al. 2020, section 7.
    """
    return (3 if stage == 3 else 2) * parameters


def classic_layer_activation_bytes(*, sequence, micro_batch, hidden, heads):
    """s·b·h·(34 + 5·a·s/h) per layer: a GPT block with plain MLP of width 4h, dropout and materialised attention.

    34 = attention 11 + MLP 19 + two LayerNorms 4, in 16 bit with 1-byte masks; 5·a·s/h are scores, softmax and its
    dropout. Korthikanti et al. 2022, arXiv 2205.05198, equation 1. The models of today keep other things: block.py.
    """
    return sequence * micro_batch * (34 * hidden + 5 * heads * sequence)
