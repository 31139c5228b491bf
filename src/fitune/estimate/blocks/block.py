"""A decoder block by the architectures of families.py: its profile, and the stages in the order they run. Mixtures:
experts.py."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from fitune.estimate.blocks import activations, transient
from fitune.estimate.blocks.eager import block_passes
from fitune.estimate.blocks.experts import expert_stages
from fitune.estimate.blocks.site import (
    FP32,
    Site,
    norms_keep_input,
    seen_by_kernel,
    whole_weight_bytes,
    with_linears,
)
from fitune.values.counts import attention_flops_per_pair
from fitune.values.model.block_profile import Attention, BatchShape, BlockProfile, Stage
from fitune.values.model.model_spec import BlockAttention, Linear
from fitune.values.model.traits import (
    attends_in_one_call,
    falls_back_to_scores,
    has_scores,
    writes_scores,
    writes_stream_scores,
)
from fitune.values.plan import Plan


def block_profile(
    plan: Plan,
    shape: BatchShape,
    *,
    gradient_enters: bool,
    has_adapters: bool,
    has_window: bool,
) -> BlockProfile:
    """The profile of one kind of block, by the formulas of transformers' eager code."""
    forward, backward = block_passes(plan, has_adapters=has_adapters)
    return BlockProfile(
        stages=block_stages(
            plan, shape, gradient_enters=gradient_enters, has_adapters=has_adapters, has_window=has_window
        ),
        forward=forward,
        backward=backward,
        attention=_attention(plan, has_window=has_window),
    )


def _attention(plan: Plan, *, has_window: bool) -> Attention:
    model = plan.model
    by_row: Literal["rows", "written rows"] = "written rows" if has_scores(plan) else "rows"
    return Attention(
        heads=model.num_heads,
        head_size=model.head_dim,
        flops_per_pair=attention_flops_per_pair(model.attention_of(0)),
        sees=seen_by_kernel(
            plan, BlockAttention(width=model.q_dim, window=has_window * model.sliding_window)
        ),
        over="stream" if model.masks_whole_stream else by_row,
    )


def block_stages(
    plan: Plan,
    shape: BatchShape,
    *,
    gradient_enters: bool = True,
    has_adapters: bool = True,
    has_window: bool = False,
) -> tuple[Stage, ...]:
    """Attention and MLP in the order they run; parallel blocks share or repeat the input norm.

    ``gradient_enters``: something before the block trains. ``has_adapters``: LoRA adapts this one.
    ``has_window``: its attention has a sliding window.
    """
    site = Site(plan, shape, gradient_enters, has_adapters, has_window)
    attention = [m for m in plan.model.linears if m.part == "attention"]
    mlp = [m for m in plan.model.linears if m.part != "attention"]
    projections, output = attention[:-1], attention[-1:]
    enters = site.gradient_enters
    inside = enters or site.trains(projections)
    after = inside or site.trains(output)
    reaches_mlp = enters if plan.model.parallel_blocks else after
    return tuple(
        [
            _norm(site, "attention norm", passes=enters, read_by=projections),
            *attention_stages(
                site, projections, output, passes=inside, beside_mlp=enters or site.trains(mlp[:-1])
            ),
            *_sandwich_norm(site, "attention output norm", passes=after),
            # experts keep what they gather of the norm's output; its router alone reads it as it is
            *_second_norm(site, passes=reaches_mlp, read_by=mlp[:1] if plan.model.num_experts else mlp[:-1]),
            *(
                expert_stages(site, mlp, passes=after)
                if plan.model.num_experts
                else mlp_stages(site, mlp, passes=reaches_mlp, attention_passes=after)
            ),
            *_sandwich_norm(site, "MLP output norm", passes=after or site.trains(mlp)),
        ]
    )


def final_norm_stage(plan: Plan, shape: BatchShape) -> Stage:
    """The norm after the last block. Its output is the hidden state, which the trainer holds itself."""
    return _norm(Site(plan, shape, True), "final norm", passes=True, read_by=())


def _norm(site: Site, name: str, *, passes: bool, read_by: Sequence[Linear]) -> Stage:
    """A norm over the hidden size, with the input that the linears behind it share."""
    output_kept = bool(read_by) and site.reads_input(read_by)
    weights = (site.h if site.model.norm_type == "rms" else 2 * site.h) if site.full else 0
    return Stage(
        name=name,
        kept=activations.norm_kept(site, size=site.h, groups=1, passes=passes)
        + output_kept * site.t * site.e * site.h,
        forward=transient.norm_forward(site),
        backward=transient.norm_backward(site, output_kept=output_kept) if passes or site.full else 0,
        gradients=weights * site.e,
        largest_gradient=weights * site.e,
    )


def _second_norm(site: Site, *, passes: bool, read_by: Sequence[Linear]) -> Iterator[Stage]:
    if site.model.norms_per_block < 2:
        return
    norm = _norm(site, "MLP norm", passes=passes, read_by=read_by)
    if not site.model.parallel_blocks:
        yield norm
        return
    same_input = site.t * site.e * site.h if passes or site.full else 0
    yield replace(norm, kept=norm.kept - same_input)  # both read the block's input


def _sandwich_norm(site: Site, name: str, *, passes: bool) -> Iterator[Stage]:
    """Gemma normalises what attention and MLP give back, before it is added."""
    if site.norms_outputs:
        norm = _norm(site, name, passes=passes, read_by=())
        yield replace(norm, making=transient.output_norm_making(site)) if norm.kept else norm


def attention_stages(
    site: Site, projections: Sequence[Linear], output: Sequence[Linear], *, passes: bool, beside_mlp: bool
) -> Iterator[Stage]:
    """Stages of attention: queries, keys and values; scores; output. ``passes``: a gradient goes back through them.

    ``beside_mlp``: so it does through the MLP's input, whose gradient waits in parallel blocks: they go back MLP first.
    """
    dropout = site.model.dropout.attention_output
    waiting = site.t * site.e * site.h if site.model.parallel_blocks and beside_mlp else 0
    inputs = Stage(
        name="queries, keys, values",
        kept=_queries_keys_values(site, projections) if passes else 0,
        forward=transient.projections_forward(site),
        backward=transient.projections_backward(site) + waiting if passes else 0,
    )
    yield with_linears(site, inputs, projections, input_has_gradient=site.gradient_enters)
    scores = _scores(site, output_needed=site.reads_input(output))
    yield (
        replace(scores, backward=scores.backward + waiting)
        if passes
        else Stage(name=scores.name, forward=scores.forward)
    )
    outputs_back = transient.output_projection_backward(site) + site.dropout_backward(dropout)
    outputs = Stage(
        name="attention output",
        kept=site.dropout_kept(dropout, passes=passes or site.trains(output)),
        backward=outputs_back + max(site.shared_dropout_gradient, waiting),
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
        kept = activations.written_queries_kept(site)
    else:
        kept = activations.queries_keys_values_kept(
            site, one_linear=one_linear, read_as_projected=site.k == model.kv_dim
        )
    if model.qk_norm == "none":
        return kept
    # a gradient goes through them; at the first block of LoRA only where their own linear is adapted
    q, k = (site.gradient_enters or site.trains([m]) for m in projections[:2])
    size, groups = q * model.q_dim + k * model.kv_dim, q * model.num_heads + k * model.num_kv_heads
    return kept + activations.norm_kept(site, size=size, groups=groups, passes=True)


def _scores(site: Site, *, output_needed: bool) -> Stage:
    """Attention itself: fused, written out by fitune, or by torch."""
    if writes_stream_scores(site.plan) or falls_back_to_scores(site.plan):
        return _fallback_scores(site, output_needed=output_needed)
    rows = 1 if site.model.masks_whole_stream or attends_in_one_call(site.plan) else site.shape.rows
    if writes_scores(site.plan):
        return _written_scores(site, rows=rows, output_needed=output_needed)
    return Stage(
        name="attention",
        kept=activations.fused_attention_kept(site, rows=rows, output_needed=output_needed),
        forward=transient.window_mask_making(site),
        backward=transient.fused_attention_backward(site, rows=rows),
    )


def _written_scores(site: Site, *, rows: int, output_needed: bool) -> Stage:
    """Attention that fitune writes out, a row at a time: eager, and capped scores."""
    backward = max(
        transient.written_attention_backward(site, row_tokens=row, rows=rows, output_kept=output_needed)
        - activations.written_scores_kept(site, pairs=gone)
        for row, gone in site.shape.rows_going_back()
    )
    longest, twice = site.shape.row_tokens, site.plan.goes_back_twice
    return Stage(
        name="attention",
        kept=activations.written_attention_kept(site, output_needed=output_needed),
        forward=transient.written_attention_forward(site),
        again=transient.written_attention_again(site),
        backward=backward,
        incoming=site.t * site.e * site.h,
        backward_holding=transient.written_attention_backward(
            site, row_tokens=longest, rows=rows, output_kept=output_needed, holding=True
        )
        if twice
        else 0,
    )


def _fallback_scores(site: Site, *, output_needed: bool) -> Stage:
    """Attention that torch writes out: Falcon-7B's over the whole stream, and row by row where a CPU drops out."""
    shape, dropped = site.shape, site.model.dropout.attention > 0
    row_tokens, rows, pairs = shape.row_tokens, shape.rows, shape.pairs()
    if writes_stream_scores(site.plan):
        row_tokens, rows, pairs = shape.tokens, 1, shape.tokens**2
    return Stage(
        name="attention",
        kept=activations.fallback_attention_kept(
            site, pairs=pairs, output_needed=output_needed, dropped=dropped
        ),
        forward=transient.fallback_attention_forward(site, row_tokens=row_tokens, dropped=dropped),
        backward=transient.fallback_attention_backward(
            site, row_tokens=row_tokens, rows=rows, dropped=dropped, output_kept=output_needed
        ),
    )


def mlp_stages(
    site: Site, linears: Sequence[Linear], *, passes: bool, attention_passes: bool
) -> Iterator[Stage]:
    """``passes``: a gradient goes through its input; ``attention_passes``: through what attention adds beside it."""
    model, activation = site.model, site.activation
    inputs, down = linears[:-1], linears[-1:]
    gated = model.mlp_type == "gated"
    halves = gated and len(inputs) == 1  # one linear makes gate and up (Phi-3)
    adapted_in, adapted_out = bool(site.adapted(inputs)), bool(site.adapted(down))
    reaches = passes or site.trains(inputs)
    goes_back = reaches or site.trains(down)
    drops_sum = model.parallel_blocks and not model.dropout.attention_output and attention_passes
    wide, stream = site.t * site.e * site.f, site.t * site.e * site.h
    # the block's input, and what the MLP is added to
    waiting = 0 if norms_keep_input(site.plan) else 2 * stream
    input_held = 0 if site.reads_input(inputs) else stream  # by the MLP's caller alone
    # what attention gave, where that is not let go of
    beside_attention = stream if model.parallel_blocks or model.learned_positions else 0
    unpacked = whole_weight_bytes(site, down, again=True)
    keeps_product = reaches and not gated and activation.keeps_output
    # a packed product without adapter keeps nothing: a block runs again only when the gated product's gradient is there
    gate_first = gated and site.fused and unpacked and not adapted_out
    inputs_back = transient.mlp_inputs_backward(site, partial_gradients=2 if gated else 1)
    yield with_linears(
        site,
        Stage(
            name="MLP inputs",
            backward=inputs_back + site.shared_dropout_gradient if reaches else 0,
            again=gate_first
            * (stream + input_held + 3 * wide + whole_weight_bytes(site, inputs, again=True)),
            incoming=gate_first * (stream + wide),
        ),
        inputs,
        input_has_gradient=site.gradient_enters if model.parallel_blocks else passes,
    )
    in_halves = activations.gated_mlp_tensors_kept(activation, halves=halves)
    if gated and site.fused:
        # gate and up; the activated gate is computed again (liger_kernel.ops.swiglu, geglu 0.8.5)
        tensors_kept = 2
        backward = transient.fused_gate_backward(site, halves=halves, adapted_output=adapted_out)
    elif gated:
        tensors_kept, backward = in_halves, transient.gate_backward(site, width=site.f, halves=halves)
    else:  # 1 for GELU in one kernel, 4 for gelu_new
        tensors_kept = activation.kept + activation.keeps_output
        backward = transient.activation_backward(site, adapted_output=adapted_out)
    tensors = max((3 if gated else 2) + adapted_in, activation.forward)
    again = incoming = making = 0
    if gated and not site.fused and site.adapted(inputs[1:]):
        # the second half's base, low-rank output and this one scaled, of which one is kept
        making = waiting + input_held + 2 * wide
    if halves:
        tensors = max(6 if adapted_in else 4, activation.forward + 1)
    if halves and adapted_in:  # base, low-rank output and this one scaled of both at once
        making = waiting + input_held + (6 - tensors_kept) * wide
        incoming = (1 + (adapted_out and not model.dropout.mlp_output)) * stream
        # the block's input is counted with those that recompute keeps
        again = making - waiting // 2 + incoming
    if gate_first:
        incoming = stream + wide
        again = max(again, input_held + wide + incoming)
    yield Stage(
        name="MLP activation",
        kept=tensors_kept * wide if reaches else 0,
        # in parallel blocks in place of the residual, which is the block's input
        forward=transient.mlp_forward(site, width=site.f, tensors=tensors)
        + (0 if model.parallel_blocks else beside_attention),
        backward=backward + site.shared_dropout_gradient if reaches else 0,
        again=again,
        making=making,
        incoming=incoming,
    )
    again = 0
    if not (keeps_product or site.reads_input(down)):  # else going back takes more
        others = adapted_out + (not norms_keep_input(site.plan)) + (not site.reads_input(inputs))
        again = transient.mlp_output_again(site, others=others) + beside_attention
    # the residual's gradient, and an adapter's scaled one
    incoming = (1 + (adapted_out and not site.norms_outputs)) * stream
    beside_packed = unpacked and adapted_out and not site.has_dora  # DoRA's norms take more: with_linears
    if beside_packed and site.reads_input(down):
        again = waiting // 2 + incoming + stream + unpacked
    output_back = transient.down_projection_backward(site) + site.dropout_backward(model.dropout.mlp_output)
    # the adapter goes back first: its scaled gradient is gone when the base's weight is whole
    if beside_packed:
        output_back -= min(stream, whole_weight_bytes(site, down))
    product_kept = wide if site.reads_input(down) and not keeps_product else 0
    # the product, where nobody keeps it, and the output: of an adapter base, low rank and scaled
    product_held = 0 if keeps_product or product_kept else wide
    making = waiting + beside_attention + input_held + product_held
    making += stream + max(2 * stream * adapted_out, unpacked)
    outputs = Stage(
        name="MLP output",
        kept=product_kept + site.dropout_kept(model.dropout.mlp_output, passes=goes_back or drops_sum),
        backward=output_back if goes_back else 0,
        again=again,
        incoming=incoming if again else 0,
        making=making if goes_back else 0,
    )
    yield with_linears(site, outputs, down)
