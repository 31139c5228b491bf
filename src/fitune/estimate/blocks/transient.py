"""Bytes that live for a moment inside a block's forward or backward, beyond what autograd keeps.

Symbols as in site.py. Backward figures hold at the worst moment of the stage and count the
gradient of the residual stream, e·h per token, that lives through the whole block.
"""

from fitune.estimate.blocks.site import FP32, Site
from fitune.values.model.traits import attends_in_one_call


def norm_forward(site: Site) -> int:
    """t · (e·h + 12·h): residual, fp32 copy, its square, or the scaled copy before it is cast.

    2·t·e·h with Liger: residual and output; its kernel makes nothing between.
    """
    return site.t * site.h * (2 * site.e if site.fused else site.e + 3 * FP32)


def norm_backward(site: Site, *, output_kept: bool) -> int:
    """t · h · (e + 20 − freed): five fp32 tensors of the input's size at once.

    They are the gradient through the scale, the spread-out gradient of the mean, and the three factors of the
    square's derivative. ``freed`` is what this stage kept and has let go of: the norm's output, e, and what a
    trained weight multiplied.
    A LayerNorm, or Liger's kernel: t · e·h · (3 − freed), residual gradient, gradient of the output, gradient of the
    input.
    """
    if site.model.norm_type == "layer" or site.fused:
        return site.t * site.e * site.h * (3 - output_kept)
    return site.t * site.h * (site.e + 5 * FP32 - output_kept * site.e - site.scaled_bytes)


def output_norm_making(site: Site) -> int:
    """t · h · (3e + 8, 3e + 4 + e where its weight trains): block's input, residual and the norm's input; the fp32 copy
    scaled twice, of which the first is kept where the weight trains, and then the second is cast. 0 for one kernel.
    """
    if site.fused or site.e == FP32:
        return 0
    return site.t * site.h * (3 * site.e + FP32 + (site.e if site.full else FP32))


def projections_forward(site: Site) -> int:
    """t · e · (2h + 4q + 3k): residual, norm output, projections, and rotary's products for the queries.

    Liger: t · e · (2h + 3q + 2k), queries and keys turned where they are; 3q while an adapter is added.
    """
    q, k = (3 * site.q, 2 * site.k) if site.fused else (4 * site.q, 3 * site.k)
    return site.t * site.e * (2 * site.h + q + k)


def projections_backward(site: Site) -> int:
    """t · e · (h + max(2q + 2k + 2q, q + 2k + 2h)): through the rotation of the queries, or into the input.

    Rotation: gradients of q, k and v, and two to three tensors of the query's size; projection: the gradient
    of its input from one linear and their sum so far. Liger turns gradients where they are: the projection alone.
    """
    rotation = 0 if site.fused else 4 * site.q + 2 * site.k
    projection = site.q + 2 * site.k + 2 * site.h
    return site.t * site.e * (site.h + max(rotation, projection))


def fused_attention_backward(site: Site, *, rows: int) -> int:
    """t · e·(h + 2q + 2k [+ q + 2k joining rows]) [+ t' · (4·q + 4n) and t · 2·e·q for grouped heads, on CUDA].

    Gradient of the output, gradients of q, k, v; with several rows theirs are made one by one and joined. The
    CUDA kernel accumulates dq in fp32, and makes the gradients of grouped keys and values for every query head before
    it adds them up (flash_api.cpp mha_bwd: dq_accum, dk_expanded, dv_expanded; read there, not measured by us). Where
    one call takes all rows, t' is t and 128 for each row (mha_varlen_bwd), else t.
    """
    q, k = site.q, site.k
    joined = q + 2 * k if rows > 1 else 0
    expanded = 2 * site.e * q if k != q else 0
    padded = site.t + 128 * site.shape.rows * attends_in_one_call(site.plan)
    workspace = padded * FP32 * (q + site.n) + site.t * expanded if site.on_cuda else 0
    return site.t * site.e * (site.h + 2 * q + 2 * k + joined) + workspace


def window_mask_making(site: Site) -> int:
    """11·s²: int64 distances between the tokens of a row and three masks of booleans made of them."""
    return 11 * site.shape.row_tokens**2 if site.masks_rows else 0


def written_attention_forward(site: Site) -> int:
    """s² · (n·(e + 8) + 1) where scores are cast, s² · (n·(2e + 4) + 1) for others of 16 bit, in fp32 8·n·s², or 12
    when capped, for one row; + t·e·(2h + 4q).

    Masked scores, their fp32 copy, the softmax and a mask; or the softmax and its 16-bit copy; or scores, a cap's
    quotient and its tangent. Residual, input, queries, keys and values, and these two repeated.
    """
    copied = FP32 if site.casts_scores else site.e if site.e < FP32 else 0
    at_softmax = site.n * (site.e + FP32 + copied) + 1
    per_pair = max(at_softmax, site.n * (2 + site.model.caps_scores) * site.e)
    return site.shape.row_tokens**2 * per_pair + site.t * site.e * (2 * site.h + 4 * site.q)


def written_attention_again(site: Site) -> int:
    """s² · (n·(4 where scores are cast, else e; less a dropout's mask) + 1) for one row; + t·e·(2h + 2k).

    Beside what is kept: the masked scores, and their fp32 copy while the 16-bit softmax is not there yet; a mask and
    its opposite. Residual and the gradient that waits; keys and values before they are repeated.
    """
    per_score = (FP32 if site.casts_scores else site.e) - site.score_mask_bytes
    scores = site.shape.row_tokens**2 * (site.n * per_score + 1)
    return scores + site.t * site.e * (2 * site.h + 2 * site.model.kv_dim)


def written_attention_backward(
    site: Site, *, row_tokens: int, rows: int, output_kept: bool, holding: bool = False
) -> int:
    """n·s² · (8 − e) [fp32: 8] for one row, + 4 on CUDA; + t·e·h, + t·e·q with several rows; − t·e·q, the output, where
    that is kept.

    With dropout n·s² · max(e, 8 [12] − e − mask): the dropped probabilities and their mask are let go before.

    Gradients of the softmax's output in fp32 and of its input, fp32 where scores were cast, when the 16-bit
    probabilities are gone; CUDA's kernel multiplies gradient and output first (SoftMax.cu). The residual's gradient,
    and the output's while other rows wait for it. Gradients of values are where the values were. ``holding``: nothing
    is let go, because backward runs again.
    """
    mask_bytes = site.score_mask_bytes
    freed = (site.e if mask_bytes or site.e < FP32 else 0) + mask_bytes
    gradients = FP32 + (FP32 if site.casts_scores else site.e) + (FP32 if site.on_cuda else 0)
    per_score = max(site.e, gradients - (0 if holding else freed))
    waiting = (rows > 1) - (output_kept and not holding)
    return site.n * row_tokens**2 * per_score + site.t * site.e * (site.h + waiting * site.q)


def fallback_attention_forward(site: Site, *, row_tokens: int, dropped: bool) -> int:
    """n·s²·(8, 12 with dropout) + t · (e·(2h + 2q + 4k) + 4·(2q + 3k)): two tensors of scores in fp32, or three.

    Scores and masked scores, or those and the softmax; with dropout softmax, noise and what is left. Residual, input,
    projections and their copies by heads; queries, keys and values in fp32, queries and keys scaled.
    """
    q, k = site.q, site.k
    copies = site.e * (2 * site.h + 2 * q + 4 * k) + FP32 * (2 * q + 3 * k)
    return (3 if dropped else 2) * FP32 * site.n * row_tokens**2 + site.t * copies


def fallback_attention_backward(
    site: Site, *, row_tokens: int, rows: int, dropped: bool, output_kept: bool
) -> int:
    """n·s²·8, 12 on CUDA, + t·e·h, + t·e·q with several rows, − t·e·q where the output is kept: gradients of the
    probabilities and of the scores, in fp32, and CUDA's product of gradient and output.

    With dropout n·s²·4: gradients are made while the dropped probabilities and then the noise are let go.
    """
    waiting = (rows > 1) - output_kept
    scores = (1 if dropped else 2 + site.on_cuda) * FP32 * site.n * row_tokens**2
    return scores + site.t * site.e * (site.h + waiting * site.q)


def output_projection_backward(site: Site) -> int:
    """t · e · (q + h, more with an adapter or a norm behind it)."""
    return site.t * site.e * (site.output_gradients * site.h + site.q)


def mlp_forward(site: Site, *, width: int, tensors: int) -> int:
    """t · e · (2h + tensors·f): residual, norm output, and ``tensors`` of the MLP's ``width`` at once.

    Gated: 3 (activated gate, up, product); an adapter on its inputs adds 1 (base and scaled low-rank output).
    Where one linear makes gate and up: 4 (both, activated gate, product), or 6 with an adapter (three of both).
    More where the activation makes more on its way.
    """
    return site.t * site.e * (2 * site.h + tensors * width)


def down_projection_backward(site: Site) -> int:
    """t · e · (f + h, more with an adapter or a norm behind it): the gradient of the product appears while the product
    is still kept.

    In place of its scaled gradient an adapter may hold the second of two partial ones, after the product is gone.
    """
    return site.t * site.e * (site.output_gradients * site.h + site.f)


def gate_backward(site: Site, *, width: int, halves: bool) -> int:
    """t · e · max(h + 3f, 2h + (backward − freed)·f): back through the product, then through the activation.

    First gradients of the product, of the activated gate and of up; then what the activation needs, when the product
    has let go of up and, unless the activation itself keeps it, of the activated gate. Up's gradient has by then
    become one of the shared input; where one linear makes both (``halves``) it waits, with up, for the gate's.
    """
    activation = site.activation
    freed = int(activation.makes_output and not activation.keeps_output)
    if halves:
        freed -= 1 if activation.keeps_input else -1
        return site.t * site.e * (site.h + max(3, activation.backward - freed) * width)
    through = 2 * site.h + (activation.backward - freed - 1) * width
    return site.t * site.e * max(site.h + 3 * width, through)


def fused_gate_backward(site: Site, *, halves: bool, adapted_output: bool) -> int:
    """t · e · (h + f): gradient of the product; those of gate and up are written over them.

    3·f where one linear makes both (``halves``): theirs is another tensor of 2·f. And where base and adapter each have
    a gradient of the product and their sum is a new tensor.
    """
    return site.t * site.e * (site.h + (3 if halves or adapted_output else 1) * site.f)


def mlp_inputs_backward(site: Site, *, partial_gradients: int) -> int:
    """t · e · (h + p·(f + h)): gradients of gate and up, and as many (``p``) partial ones of their shared input."""
    return site.t * site.e * (site.h + partial_gradients * (site.f + site.h))


def activation_backward(site: Site, *, adapted_output: bool) -> int:
    """t · e · (h + tensors·f): gradients of the activation's output and input, and what lies between them.

    3 at least where base and adapter each have a gradient of the output and their sum is a new tensor.
    """
    tensors = max(site.activation.backward, 3 if adapted_output else 0)
    return site.t * site.e * (site.h + tensors * site.f)


def mlp_output_again(site: Site, *, others: int) -> int:
    """t · e · (f + 2h + others·h): a product whose input nobody keeps, without an adapter or with one that drops out.

    Its input and output, and the residual's gradient; ``others`` of the hidden size are the residual and the MLP's
    input, where nobody keeps them, and the adapter's output.
    """
    return site.t * site.e * (site.f + (2 + others) * site.h)


def final_norm_forward(*, tokens: int, hidden: int, element_bytes: int, trained: bool) -> int:
    """t · h · (4 + e, + e while frozen): the scaled fp32 copy, the norm's input, the cast copy unless it is kept.

    In fp32 the casts are no copies: the scaled one alone, and nothing extra when it is kept.
    """
    if element_bytes == FP32:
        return 0 if trained else tokens * hidden * FP32
    return tokens * hidden * (FP32 + element_bytes + (0 if trained else element_bytes))
