"""Cross-entropy and its gradient in one Triton kernel: every logit is read twice and written once, in its own type.

Imported where Triton is there (``kernels: liger``). Liger's own kernel counts the labels on the host first, which waits
for the GPU in each chunk, so this one is ours. Shapes: S supervised tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Logits of a row that are looked at together."""


# Triton types the parameters of a kernel itself, when it is launched, and reads annotations as its own words.
@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits, labels, losses, row_stride, vocab_size, scale, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: its loss, and ``scale`` · (softmax − one-hot) over its logits.

    The maximum and the sum of exponentials are found in one pass (Milakov and Gimelshein 2018, arXiv 1805.02867).
    """
    row = tl.program_id(0).to(tl.int64)  # a row's offset does not fit into 32 bits
    logits += row * row_stride
    label = tl.load(labels + row)
    # before anything is written: the reductions below keep all threads behind this load
    own = tl.load(logits + label).to(tl.float32)
    if CAPPED:
        own = softcap * _tanh(own / softcap)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(columns < vocab_size, softcap * _tanh(x / softcap), float("-inf"))
        before = largest
        largest = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(x - largest), axis=0)
    tl.store(losses + row, largest + tl.log(total) - own)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
        slope = 1.0
        if CAPPED:
            tangent = _tanh(x / softcap)
            x = softcap * tangent
            slope = 1.0 - tangent * tangent
        gradient = (tl.exp(x - largest) / total - tl.where(columns == label, 1.0, 0.0)) * slope * scale
        tl.store(logits + columns, gradient, mask=columns < vocab_size)


def cross_entropy(logits_SV: Tensor, labels_S: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Each row's negative log-likelihood in fp32 [S]; ``logits_SV`` become their gradient, times ``scale``.

    ``softcap``: the logits count as softcap · tanh(logits / softcap).
    """
    rows, vocab_size = logits_SV.shape
    losses_S = torch.empty(rows, dtype=torch.float32, device=logits_SV.device)
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    cross_entropy_kernel[(rows,)](
        logits_SV, labels_S, losses_S, logits_SV.stride(0), vocab_size, scale, float(softcap or 1.0),
        CAPPED=softcap is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return losses_S
