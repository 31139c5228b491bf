"""Bytes that live for a moment inside a block's forward or backward, beyond what autograd keeps.

Symbols as in activations.py. Backward figures hold at the worst moment of the stage and count the
gradient of the residual stream, e·h per token, that lives through the whole block.
"""

from fitune.estimate.blocks.activations import FP32
from fitune.spec.model.traits import Activation


def rms_norm_forward(*, tokens: int, hidden: int, element_bytes: int) -> int:
    """t · (e·h + 12·h): residual, fp32 copy, its square, or the scaled copy before it is cast."""
    return tokens * hidden * (element_bytes + 3 * FP32)


def rms_norm_backward(*, tokens: int, hidden: int, element_bytes: int, freed_sizes: int) -> int:
    """t · h · (e + 20 − freed·e): five fp32 tensors of the input's size at once.

    They are the gradient through the scale, the spread-out gradient of the mean, and the three factors of the
    square's derivative. ``freed_sizes`` counts the 16-bit tensors of this stage already let go of:
    the norm's output and, when it trains, what the weight multiplied.
    """
    return tokens * hidden * (element_bytes + 5 * FP32 - freed_sizes * element_bytes)


def fused_rms_norm_forward(*, tokens: int, hidden: int, element_bytes: int) -> int:
    """2·t·e·h: residual and output; Liger's kernel makes nothing between."""
    return 2 * tokens * hidden * element_bytes


def layer_norm_backward(*, tokens: int, hidden: int, element_bytes: int, freed_sizes: int) -> int:
    """t · e·h · (3 − freed): residual gradient, gradient of the output, gradient of the input."""
    return tokens * hidden * element_bytes * (3 - freed_sizes)


def projections_forward(*, tokens: int, hidden: int, q_dim: int, kv_dim: int, element_bytes: int) -> int:
    """t · e · (2h + 4q + 3k): residual, norm output, projections, and rotary's products for the queries."""
    return tokens * element_bytes * (2 * hidden + 4 * q_dim + 3 * kv_dim)


def projections_in_place_forward(
    *, tokens: int, hidden: int, q_dim: int, kv_dim: int, element_bytes: int
) -> int:
    """t · e · (2h + 3q + 2k): as above, with queries and keys turned where they are; 3q while an adapter is added."""
    return tokens * element_bytes * (2 * hidden + 3 * q_dim + 2 * kv_dim)


def projections_in_place_backward(
    *, tokens: int, hidden: int, q_dim: int, kv_dim: int, element_bytes: int
) -> int:
    """t · e · (3h + q + 2k): gradients of q, k and v, turned where they are, and two of their input."""
    return tokens * element_bytes * (3 * hidden + q_dim + 2 * kv_dim)


def projections_backward(*, tokens: int, hidden: int, q_dim: int, kv_dim: int, element_bytes: int) -> int:
    """t · e · (h + max(2q + 2k + 2q, q + 2k + 2h)): through the rotation of the queries, or into the input.

    Rotation: gradients of q, k and v, and two to three tensors of the query's size; projection: the gradient
    of its input from one linear and their sum so far.
    """
    rotation = 4 * q_dim + 2 * kv_dim
    projection = q_dim + 2 * kv_dim + 2 * hidden
    return tokens * element_bytes * (hidden + max(rotation, projection))


def fused_attention_backward(
    *,
    tokens: int,
    rows: int,
    hidden: int,
    q_dim: int,
    kv_dim: int,
    num_heads: int,
    element_bytes: int,
    on_cuda: bool,
) -> int:
    """t · (e·(h + q + q + 2k) [+ e·(q + 2k) joining rows] [+ 4·q + 4n, and 2·e·q when heads are grouped, on CUDA]).

    Gradient of the output, gradients of q, k, v; with several rows theirs are made one by one and joined. The
    CUDA kernel accumulates dq in fp32, and makes the gradients of grouped keys and values for every query head before
    it adds them up (flash_api.cpp mha_bwd: dq_accum, dk_expanded, dv_expanded; read there, not measured by us).
    """
    joined = q_dim + 2 * kv_dim if rows > 1 else 0
    expanded = 2 * element_bytes * q_dim if kv_dim != q_dim else 0
    workspace = FP32 * (q_dim + num_heads) + expanded if on_cuda else 0
    return tokens * (element_bytes * (hidden + 2 * q_dim + 2 * kv_dim + joined) + workspace)


def window_mask_making(*, row_tokens: int) -> int:
    """11·s²: int64 distances between the tokens of a row and three masks of booleans made of them."""
    return 11 * row_tokens**2


def eager_attention_forward(
    *,
    tokens: int,
    row_tokens: int,
    hidden: int,
    q_dim: int,
    num_heads: int,
    element_bytes: int,
    softcapped: bool,
    cast: bool,
) -> int:
    """s² · (n·(e + 8) + 1) where scores are ``cast``, s² · (n·(2e + 4) + 1) for others of 16 bit, in fp32 8·n·s², or 12
    when capped, for one row; + t·e·(2h + 4q).

    Masked scores, their fp32 copy, the softmax and a mask; or the softmax and its 16-bit copy; or scores, a cap's
    quotient and its tangent. Residual, input, queries, keys and values, and these two repeated.
    """
    copied = FP32 if cast else element_bytes if element_bytes < FP32 else 0
    at_softmax = num_heads * (element_bytes + FP32 + copied) + 1
    per_pair = max(at_softmax, num_heads * (2 + softcapped) * element_bytes)
    return row_tokens**2 * per_pair + tokens * element_bytes * (2 * hidden + 4 * q_dim)


def eager_attention_again(
    *,
    tokens: int,
    row_tokens: int,
    hidden: int,
    kv_dim: int,
    num_heads: int,
    element_bytes: int,
    mask_bytes: int,
    cast: bool,
) -> int:
    """s² · (n·(4 where ``cast``, else e; less a dropout's mask) + 1) for one row; + t·e·(2h + 2k).

    Beside what is kept: the masked scores, and their fp32 copy while the 16-bit softmax is not there yet; a mask and
    its opposite. Residual and the gradient that waits; keys and values before they are repeated.
    """
    per_score = (FP32 if cast else element_bytes) - mask_bytes
    return row_tokens**2 * (num_heads * per_score + 1) + tokens * element_bytes * (2 * hidden + 2 * kv_dim)


def eager_attention_backward(
    *,
    tokens: int,
    row_tokens: int,
    rows: int,
    hidden: int,
    q_dim: int,
    num_heads: int,
    element_bytes: int,
    mask_bytes: int,
    cast: bool,
    on_cuda: bool,
    holding: bool = False,
) -> int:
    """n·s² · (8 − e) [fp32: 8] for one row, + 4 on CUDA; + t·e·h, + t·e·q with several rows.

    With dropout n·s² · max(e, 8 [12] − e − mask): the dropped probabilities and their mask are let go before.

    Gradients of the softmax's output in fp32 and of its input, fp32 where it was ``cast``, when the 16-bit
    probabilities are gone; CUDA's kernel multiplies gradient and output first (SoftMax.cu). The residual's gradient,
    and the output's while other rows wait for it. Gradients of values are where the values were. ``holding``: nothing
    is let go, because backward runs again.
    """
    freed = (element_bytes if mask_bytes or element_bytes < FP32 else 0) + mask_bytes
    gradients = FP32 + (FP32 if cast else element_bytes) + (FP32 if on_cuda else 0)
    per_score = max(element_bytes, gradients - (0 if holding else freed))
    waiting = q_dim if rows > 1 else 0
    return num_heads * row_tokens**2 * per_score + tokens * element_bytes * (hidden + waiting)


def fallback_attention_forward(
    *,
    tokens: int,
    row_tokens: int,
    num_heads: int,
    hidden: int,
    q_dim: int,
    kv_dim: int,
    element_bytes: int,
    dropped: bool,
) -> int:
    """n·s²·(8, 12 with dropout) + t · (e·(2h + 2q + 4k) + 4·(2q + 3k)): two tensors of scores in fp32, or three.

    Scores and masked scores, or those and the softmax; with dropout softmax, noise and what is left. Residual, input,
    projections and their copies by heads; queries, keys and values in fp32, queries and keys scaled.
    """
    copies = element_bytes * (2 * hidden + 2 * q_dim + 4 * kv_dim) + FP32 * (2 * q_dim + 3 * kv_dim)
    return (3 if dropped else 2) * FP32 * num_heads * row_tokens**2 + tokens * copies


def fallback_attention_backward(
    *,
    tokens: int,
    row_tokens: int,
    rows: int,
    num_heads: int,
    hidden: int,
    q_dim: int,
    element_bytes: int,
    dropped: bool,
    on_cuda: bool,
) -> int:
    """n·s²·8, 12 on CUDA, + t·e·h, + t·e·q with several rows: gradients of the probabilities and of the scores, in
    fp32, and CUDA's product of gradient and output.

    With dropout n·s²·4: gradients are made while the dropped probabilities and then the noise are let go.
    """
    waiting = q_dim if rows > 1 else 0
    scores = (1 if dropped else 2 + on_cuda) * FP32 * num_heads * row_tokens**2
    return scores + tokens * element_bytes * (hidden + waiting)


def dropout_backward(*, tokens: int, hidden: int, element_bytes: int, mask_bytes: int) -> int:
    """t·h·(e − mask): the gradient before dropout, beside the residual's; the mask is let go."""
    return tokens * hidden * (element_bytes - mask_bytes)


def output_projection_backward(
    *, tokens: int, hidden: int, q_dim: int, element_bytes: int, adapted: bool
) -> int:
    """t · e · (h + q); an adapter adds its scaled gradient h."""
    return tokens * element_bytes * (hidden + q_dim + (hidden if adapted else 0))


def mlp_forward(*, tokens: int, hidden: int, width: int, element_bytes: int, tensors: int) -> int:
    """t · e · (2h + tensors·f): residual, norm output, and ``tensors`` of the MLP's width at once.

    Gated: 3 (activated gate, up, product); an adapter on its inputs adds 1 (base and scaled low-rank output).
    Where one linear makes gate and up: 4 (both, activated gate, product), or 6 with an adapter (three of both).
    More where the activation makes more on its way.
    """
    return tokens * element_bytes * (2 * hidden + tensors * width)


def down_projection_backward(
    *, tokens: int, hidden: int, width: int, element_bytes: int, adapted: bool
) -> int:
    """t · e · (h + f): the gradient of the product appears while the product is still kept.

    An adapter adds its scaled gradient, h, or the second of two partial gradients after the product is gone.
    """
    return tokens * element_bytes * (hidden + width + (hidden if adapted else 0))


def gate_backward(
    *, tokens: int, hidden: int, width: int, element_bytes: int, activation: Activation, halves: bool
) -> int:
    """t · e · max(h + 3f, 2h + (backward − freed)·f): back through the product, then through the activation.

    First gradients of the product, of the activated gate and of up; then what the activation needs, when the product
    has let go of up and, unless the activation itself keeps it, of the activated gate. Up's gradient has by then
    become one of the shared input; where one linear makes both (``halves``) it waits, with up, for the gate's.
    """
    freed = int(activation.makes_output and not activation.keeps_output)
    if halves:
        freed -= 1 if activation.keeps_input else -1
        return tokens * element_bytes * (hidden + max(3, activation.backward - freed) * width)
    through = 2 * hidden + (activation.backward - freed - 1) * width
    return tokens * element_bytes * max(hidden + 3 * width, through)


def fused_gate_backward(*, tokens: int, hidden: int, width: int, element_bytes: int, halves: bool) -> int:
    """t · e · (h + f): gradient of the product; those of gate and up are written over them.

    Where one linear makes both (``halves``), theirs is another tensor of 2·f.
    """
    return tokens * element_bytes * (hidden + (3 if halves else 1) * width)


def mlp_inputs_backward(
    *, tokens: int, hidden: int, width: int, element_bytes: int, partial_gradients: int
) -> int:
    """t · e · (h + p·(f + h)): gradients of gate and up, and as many (``p``) partial ones of their shared input."""
    return tokens * element_bytes * (hidden + partial_gradients * (width + hidden))


def activation_backward(*, tokens: int, hidden: int, width: int, element_bytes: int, tensors: int) -> int:
    """t · e · (h + tensors·f): gradients of the activation's output and input, and what lies between them.

    3 at least where base and adapter each have a gradient of the output and their sum is a new tensor.
    """
    return tokens * element_bytes * (hidden + tensors * width)


def fused_mlp_again(
    *, tokens: int, hidden: int, width: int, element_bytes: int, kept: int, adapted_output: bool
) -> int:
    """t · e · (2h + (6 − kept)·f) beyond what is ``kept``: an adapter on both makes three tensors of 2·f at once.

    2h are the residual and its gradient; an adapter on the output has made its scaled gradient, h, before the block
    runs again.
    """
    return tokens * element_bytes * ((3 if adapted_output else 2) * hidden + (6 - kept) * width)


def mlp_output_again(*, tokens: int, hidden: int, width: int, element_bytes: int, others: int) -> int:
    """t · e · (f + 2h + others·h): a product whose input nobody keeps, without an adapter or with one that drops out.

    Its input and output, and the residual's gradient; ``others`` of the hidden size are the residual and the MLP's
    input, where nobody keeps them, and the adapter's output.
    """
    return tokens * element_bytes * (width + (2 + others) * hidden)


def unpacked_linear_working(
    *,
    tokens: int,
    hidden: int,
    in_features: int,
    out_features: int,
    element_bytes: int,
    packed: bool,
    dora: bool,
) -> int:
    """e · (out·in·matrices [+ in²]) + t · e · (h + in + out): a frozen weight whole, beside residual, input, output.

    ``matrices`` is 1 while a packed weight is multiplied, and 3 (4 when packed) with DoRA, which forms B·A, its
    scaled copy and their sum with the weight to take the norms of the rows; B·A it makes by sending an identity
    matrix, in × in, through both (peft.tuners.lora.dora, get_lora_weight and get_weight_norm).
    """
    matrices = int(packed) + (3 if dora else 0)
    whole = matrices * in_features * out_features + (in_features**2 if dora else 0)
    return element_bytes * (whole + tokens * (hidden + in_features + out_features))


def final_norm_forward(*, tokens: int, hidden: int, element_bytes: int, trained: bool) -> int:
    """t · h · (4 + e, + e while frozen): the scaled fp32 copy, the norm's input, the cast copy unless it is kept.

    In fp32 the casts are no copies: the scaled one alone, and nothing extra when it is kept.
    """
    if element_bytes == FP32:
        return 0 if trained else tokens * hidden * FP32
    return tokens * hidden * (FP32 + element_bytes + (0 if trained else element_bytes))
