"""Stages of attention: queries, keys and values; scores, by a fused kernel or written out; the output.

Symbols as in site.py. Storages are counted once, as the allocator does; the modules are those of transformers 5, the
counts were checked storage by storage with a dispatch mode on CPU (tests/estimate). Backward holds the gradient of the
residual stream, t·e·h, through the whole block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fitune.estimate.blocks.site import FP32, Site, attended_kv_dim, norm_kept, with_linears
from fitune.values.model.block_profile import Stage
from fitune.values.model.model_spec import Linear
from fitune.values.model.traits import (
    attends_in_one_call,
    falls_back_to_scores,
    writes_scores,
    writes_stream_scores,
)


def attention_stages(
    site: Site, projections: Sequence[Linear], output: Sequence[Linear], *, passes: bool, beside_mlp: bool
) -> Iterator[Stage]:
    """Stages of attention in the order they run. ``passes``: a gradient goes back through them.

    ``beside_mlp``: so it does through the MLP's input, whose gradient waits in parallel blocks: they go back MLP first.
    """
    dropout, q, k = site.model.dropout.attention_output, site.q, site.k
    waiting = site.stream if site.model.parallel_blocks and beside_mlp else 0
    # residual, norm output, projections, and rotary's products for the queries; Liger turns queries and keys where they
    # are: 3q while an adapter is added
    turned = (3 * q + 2 * k) if site.fused else (4 * q + 3 * k)
    # back through the rotation: gradients of q, k and v, and two to three tensors of the query's size; or into the
    # input: its gradient from one linear and their sum so far
    back = max(0 if site.fused else 4 * q + 2 * k, q + 2 * k + 2 * site.h)
    inputs = Stage(
        name="queries, keys, values",
        kept=_queries_keys_values(site, projections) if passes else 0,
        forward=site.t * site.e * (2 * site.h + turned),
        backward=site.t * site.e * (site.h + back) + waiting if passes else 0,
        # back through the norm of the queries, beside the gradients of the stream and of the input
        backward_holding=(site.model.qk_norm != "none") * (2 * site.stream + 5 * FP32 * site.t * q),
    )
    yield with_linears(site, inputs, projections, input_has_gradient=site.gradient_enters)
    scores = _scores(site, output_needed=site.reads_input(output))
    yield (
        replace(
            scores,
            backward=scores.backward + waiting,
            backward_holding=scores.backward_holding + waiting,
        )
        if passes
        else Stage(name=scores.name, forward=scores.forward)
    )
    outputs = Stage(
        name="attention output",
        kept=site.dropout_kept(dropout, passes=passes or site.trains(output)),
        backward=site.t * site.e * (site.output_gradients * site.h + q)
        + site.dropout_backward(dropout)
        + max(site.shared_dropout_gradient, waiting),
    )
    yield with_linears(site, outputs, output)


def _queries_keys_values(site: Site, projections: Sequence[Linear]) -> int:
    """Returns the bytes that queries, keys and values keep until backward, the norm of queries and keys included."""
    model, one_linear = site.model, len(projections) == 1
    if writes_stream_scores(site.plan) or falls_back_to_scores(site.plan):
        # attention keeps fp32 copies of its own; in fp32 values are a view, of the whole projection of one linear
        a_view = one_linear and site.e == FP32 and site.n == model.num_kv_heads
        kept = site.t * site.e * (model.q_dim + model.kv_dim) if a_view else 0
    elif writes_scores(site.plan):
        # keys and values are kept repeated; without rotary positions the queries are a view that keeps the fused
        # projection alive
        kept = site.t * site.e * (site.q + (2 * model.kv_dim if model.learned_positions else 0))
    else:
        # rotary positions write queries and keys anew and keep only their shared table; values stay as projected. Where
        # one linear makes all three (Phi-3), they are a view that keeps the whole projection alive; Falcon copies those
        # of its one key head
        a_view = one_linear and site.k == model.kv_dim
        keeps_all = a_view and not (model.learned_positions or model.is_multi_query)
        copies = model.q_dim + model.kv_dim if keeps_all else 0
        kept = site.e * (site.t * (model.q_dim + copies) + 2 * _kept_keys(site))
    if model.qk_norm == "none":
        return kept
    # a gradient goes through them; at the first block of LoRA only where their own linear is adapted
    q, k = (site.gradient_enters or site.trains([m]) for m in projections[:2])
    size, groups = q * model.q_dim + k * model.kv_dim, q * model.num_heads + k * model.num_kv_heads
    return kept + norm_kept(site, size=size, groups=groups, passes=True)


def _kept_keys(site: Site) -> int:
    """Elements of all keys that fused attention keeps. Rows that take a window's mask have repeated keys, a copy of
    their own; one row that reads them as they are keeps all."""
    shape, window = site.shape, site.masking_window
    masked = shape.tokens_in_rows_over(window) if window else 0
    wide, narrow = (attended_kv_dim(site.plan, masked=masked) for masked in (True, False))
    if wide == narrow:
        return shape.tokens * narrow
    return masked * wide + (shape.tokens * narrow if masked < shape.tokens else 0)


def _scores(site: Site, *, output_needed: bool) -> Stage:
    """Attention itself: fused, written out by fitune, or by torch."""
    if writes_stream_scores(site.plan) or falls_back_to_scores(site.plan):
        return _fallback_scores(site, output_needed=output_needed)
    one_call = attends_in_one_call(site.plan)
    rows = 1 if site.model.masks_whole_stream or one_call else site.shape.rows
    if writes_scores(site.plan):
        return _written_scores(site, rows=rows, output_needed=output_needed)
    t, e, q, k = site.t, site.e, site.q, site.k
    # several rows' outputs are joined into one more copy, kept if the output projection trains; their gradients of
    # q, k and v are made one by one and joined
    joined, joined_back = (e * q if output_needed else 0, q + 2 * k) if rows > 1 else (0, 0)
    masks = making = workspace = 0
    if site.masks_rows:
        # SDPA turns a window's mask of booleans into one of the compute type, and its backward reads that; every block
        # makes its own, of int64 distances between the tokens of a row and three masks of booleans made of them
        masks = e * site.shape.pairs(in_rows_over=site.masking_window)
        making = 11 * site.shape.row_tokens**2
    if site.on_cuda:
        # the kernel accumulates dq in fp32, and makes the gradients of grouped keys and values for every query head
        # before it adds them up (flash_api.cpp mha_bwd: dq_accum, dk_expanded, dv_expanded; read there, not measured by
        # us); where one call takes all rows, 128 tokens more for each (mha_varlen_bwd)
        padded = t + 128 * site.shape.rows * one_call
        workspace = padded * FP32 * (q + site.n) + t * (2 * e * q if k != q else 0)
    return Stage(
        name="attention",
        # output and fp32 log-sum-exp (Dao 2023, arXiv 2307.08691, section 3.1)
        kept=t * (e * q + FP32 * site.n + joined) + masks,
        forward=making,
        # gradient of the output, gradients of q, k, v
        backward=t * e * (site.h + 2 * q + 2 * k + joined_back) + workspace,
    )


def _written_scores(site: Site, *, rows: int, output_needed: bool) -> Stage:
    """Attention that fitune writes out, a row at a time: eager, and capped scores (models/attention.py, rows_eager)."""
    t, e, n, q, h, mask_bytes = site.t, site.e, site.n, site.q, site.h, site.score_mask_bytes
    square, capped = site.shape.row_tokens**2, site.model.caps_scores
    # for each pair and head probabilities in fp32 and in the compute type, with dropout the dropped ones instead of
    # these, and the masks; capped scores (Gemma-2) keep their hyperbolic tangent too. For each pair a mask
    in_16_bit = e if mask_bytes or e < FP32 else 0
    kept_per_pair = n * (FP32 + in_16_bit + mask_bytes + e * capped) + 1
    # masked scores, their fp32 copy (or the softmax's 16-bit one), the softmax and a mask; or scores, a cap's quotient
    # and its tangent
    copied = FP32 if site.casts_scores else e if e < FP32 else 0
    made_per_pair = max(n * (e + FP32 + copied) + 1, n * (2 + capped) * e)
    # running again, beside what is kept: masked scores, or their fp32 copy while the 16-bit softmax is not there yet; a
    # mask and its opposite
    again_per_pair = n * ((FP32 if site.casts_scores else e) - mask_bytes) + 1

    def backward(row_tokens: int, *, holding: bool = False) -> int:
        """Bytes while a row goes back: gradients of the softmax's output in fp32 and of its input, fp32 where scores
        were cast, when the 16-bit probabilities, or the dropped ones and their masks, are gone; CUDA's kernel
        multiplies gradient and output first (SoftMax.cu). The residual's gradient, and the output's while other rows
        wait for it. ``holding``: nothing is let go, because backward runs again; the row's values have a gradient."""
        gradients = FP32 + (FP32 if site.casts_scores else e) + (FP32 if site.on_cuda else 0)
        per_score = max(e, gradients - (0 if holding else in_16_bit + mask_bytes))
        waiting = (rows > 1) - (output_needed and not holding)
        return n * row_tokens**2 * per_score + t * e * (h + waiting * q) + holding * row_tokens * e * q

    return Stage(
        name="attention",
        # + repeated keys and values, and the output
        kept=site.shape.pairs() * kept_per_pair + t * e * (2 * q + (q if output_needed else 0)),
        # residual, input, queries, keys and values, and these two repeated
        forward=square * made_per_pair + t * e * (2 * h + 4 * q),
        # residual and the gradient that waits; keys and values before they are repeated
        again=square * again_per_pair + t * e * (2 * h + 2 * site.model.kv_dim),
        incoming=site.stream,
        backward=max(backward(row) - gone * kept_per_pair for row, gone in site.shape.rows_going_back()),
        backward_holding=backward(site.shape.row_tokens, holding=True) if site.plan.goes_back_twice else 0,
    )


def _fallback_scores(site: Site, *, output_needed: bool) -> Stage:
    """Attention that no fused kernel takes and torch writes out: Falcon-7B's over the whole stream, whose rows are
    masked, not separate; and row by row where a CPU drops out (aten::_scaled_dot_product_attention_math)."""
    t, e, n, q, k = site.t, site.e, site.n, site.q, site.k
    shape, dropped = site.shape, site.model.dropout.attention > 0
    square, rows, pairs = shape.row_tokens**2, shape.rows, shape.pairs()
    if writes_stream_scores(site.plan):
        square, rows, pairs = shape.tokens**2, 1, shape.tokens**2
    # gradients of the probabilities and of the scores, in fp32, and CUDA's product of gradient and output; with dropout
    # one, made while the dropped probabilities and then the noise are let go of. The output's while other rows wait
    backward = (1 if dropped else 2 + site.on_cuda) * FP32 * n * square + t * e * (site.h + (rows > 1) * q)
    return Stage(
        name="attention",
        # the softmax, with dropout a mask of noise and the dropped probabilities; queries, keys and values in fp32,
        # those of grouped heads repeated; the output
        kept=FP32 * n * pairs * (3 if dropped else 1)
        + t * (FP32 * (q + 2 * k) + (e * q if output_needed else 0)),
        # scores and masked scores, or those and the softmax; with dropout softmax, noise and what is left. Residual,
        # input, projections and their copies by heads; queries, keys and values in fp32, queries and keys scaled
        forward=(3 if dropped else 2) * FP32 * n * square
        + t * (e * (2 * site.h + 2 * q + 4 * k) + FP32 * (2 * q + 3 * k)),
        backward=backward - output_needed * t * e * q,
        backward_holding=backward + FP32 * t * k,  # of the values
    )
