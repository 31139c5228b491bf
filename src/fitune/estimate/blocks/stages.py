"""The stages of a block's two halves: projections and attention; an MLP, gated or plain. Mixtures: experts.py."""

from collections.abc import Iterator, Sequence
from functools import partial

from fitune.estimate.blocks import activations, transient
from fitune.estimate.blocks.activations import FP32
from fitune.estimate.blocks.site import (
    Site,
    attended_kv_dim,
    attends_in_one_call,
    kept_keys,
    linears_stage,
    norms_keep_input,
    values_are_read_as_projected,
    whole_weight_bytes,
)
from fitune.spec.model.block_profile import Stage
from fitune.spec.model.model_spec import Linear
from fitune.spec.model.traits import ACTIVATIONS, falls_back_to_scores, writes_scores


def attention_stages(
    site: Site, projections: Sequence[Linear], output: Sequence[Linear], *, passes: bool
) -> Iterator[Stage]:
    """Stages of attention: queries, keys and values; scores; output. ``passes``: a gradient goes back through them."""
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    sizes = {"hidden": model.hidden_size, "q_dim": model.q_dim, "kv_dim": _attended_kv_dim(site)}
    kept = _queries_keys_values(site, projections) if passes else 0
    making = transient.projections_in_place_forward if site.fused else transient.projections_forward
    going_back = transient.projections_in_place_backward if site.fused else transient.projections_backward
    yield linears_stage(
        site, "queries, keys, values", projections,
        kept=kept,
        forward=making(tokens=t, element_bytes=e, **sizes),
        backward=going_back(tokens=t, element_bytes=e, **sizes) if passes else 0,
        input_has_gradient=site.gradient_enters,
    )  # fmt: skip
    yield _scores(site, output, passes=passes)
    yield linears_stage(
        site, "attention output", output,
        kept=site.dropout_kept(model.dropout.attention_output, passes=passes or site.trains(output)),
        forward=0,
        backward=transient.output_projection_backward(
            tokens=t, hidden=model.hidden_size, q_dim=model.q_dim, element_bytes=e, adapted=not site.full
        ) + site.dropout_backward(model.dropout.attention_output) + site.shared_dropout_gradient,
    )  # fmt: skip


def _queries_keys_values(site: Site, projections: Sequence[Linear]) -> int:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    rotary = model.learned_positions == 0
    if model.is_multi_query or falls_back_to_scores(site.plan):
        kept = _whole_projection(site, projections)  # attention keeps fp32 copies of its own
    elif writes_scores(site.plan):
        kept = activations.queries_kept(
            tokens=t, q_dim=model.q_dim, kv_dim=model.kv_dim, element_bytes=e, rotary=rotary
        )
    else:
        kept = activations.queries_keys_values_kept(
            tokens=t, q_dim=model.q_dim, kv_dim=model.kv_dim, element_bytes=e, rotary=rotary,
            keys=kept_keys(site.plan, site.shape, window=site.masking_window),
            fused=len(projections) == 1 and values_are_read_as_projected(site.plan, masked=site.masks_rows),
        )  # fmt: skip
    if model.qk_norm == "none":
        return kept
    size, groups = _normed(site, projections)
    return kept + site.norm_kept(size=size, groups=groups, passes=True)


def _normed(site: Site, projections: Sequence[Linear]) -> tuple[int, int]:
    """Elements and heads of the queries and keys whose norm a gradient goes through: at the first block of LoRA only
    where their own linear is adapted."""
    model, (queries, keys) = site.model, projections[:2]
    q, k = (site.gradient_enters or site.trains([m]) for m in (queries, keys))
    return q * model.q_dim + k * model.kv_dim, q * model.num_heads + k * model.num_kv_heads


def _whole_projection(site: Site, projections: Sequence[Linear]) -> int:
    """e·(q + k) per token: in fp32 values are a view, of the whole projection where one linear makes all three."""
    model, e = site.model, site.element_bytes
    a_view = len(projections) == 1 and e == FP32 and model.num_heads == model.num_kv_heads
    return site.shape.tokens * e * (model.q_dim + model.kv_dim) if a_view else 0


def _scores(site: Site, output: Sequence[Linear], *, passes: bool) -> Stage:
    """Attention itself: fused, or written out."""
    model, shape, e = site.model, site.shape, site.element_bytes
    rows = 1 if model.masks_whole_stream or attends_in_one_call(site.plan) else shape.rows
    common = {"tokens": shape.tokens, "q_dim": model.q_dim, "num_heads": model.num_heads}
    needed = site.reads_input(output)
    if model.is_multi_query or falls_back_to_scores(site.plan):
        return _fallback_scores(site, output_needed=needed, passes=passes)
    if writes_scores(site.plan):
        keeping = partial(
            activations.eager_attention_kept, q_dim=model.q_dim, num_heads=model.num_heads, element_bytes=e,
            softcapped=model.caps_scores, mask_bytes=site.score_mask_bytes,
        )  # fmt: skip
        kept = keeping(tokens=shape.tokens, pairs=shape.pairs(), output_needed=needed)
        sizes = {
            "tokens": shape.tokens, "hidden": model.hidden_size, "num_heads": model.num_heads, "element_bytes": e,
        }  # fmt: skip
        cast, mask_bytes, q = site.casts_scores, site.score_mask_bytes, model.q_dim
        longest = shape.row_tokens
        forward = transient.eager_attention_forward(
            **sizes, row_tokens=longest, q_dim=q, softcapped=model.caps_scores, cast=cast
        )
        again = transient.eager_attention_again(
            **sizes, row_tokens=longest, kv_dim=model.kv_dim, mask_bytes=mask_bytes, cast=cast
        )
        going_back = partial(
            transient.eager_attention_backward, **sizes, q_dim=q, rows=rows, mask_bytes=mask_bytes, cast=cast,
            on_cuda=not site.plan.hardware.gpu.is_cpu, holding=False,
        )  # fmt: skip
        backward = max(
            going_back(row_tokens=row) - keeping(tokens=0, pairs=gone, output_needed=False)
            for row, gone in shape.rows_going_back()
        )
        if not passes:
            return Stage(name="attention", kept=0, forward=forward, backward=0)
        return Stage(
            name="attention", kept=kept, forward=forward, again=again, backward=backward,
            incoming=shape.tokens * e * model.hidden_size,
            backward_holding=going_back(row_tokens=longest, holding=True) if site.plan.goes_back_twice else 0,
        )  # fmt: skip
    kept = activations.fused_attention_kept(**common, rows=rows, element_bytes=e, output_needed=needed)
    backward = transient.fused_attention_backward(
        **common, rows=rows, hidden=model.hidden_size, kv_dim=_attended_kv_dim(site), element_bytes=e,
        on_cuda=not site.plan.hardware.gpu.is_cpu,
    )  # fmt: skip
    making_mask = 0
    if site.masks_rows:
        cut = shape.pairs(in_rows_over=site.masking_window)
        kept += activations.window_mask_kept(pairs=cut, element_bytes=e)
        making_mask = transient.window_mask_making(row_tokens=shape.row_tokens)
    return Stage(
        name="attention",
        kept=kept if passes else 0,
        forward=making_mask,
        backward=backward if passes else 0,
    )


def _attended_kv_dim(site: Site) -> int:
    """Width of keys and values where attention reads most: in the rows that take a mask, if there are any."""
    return attended_kv_dim(site.plan, masked=site.masks_rows)


def _fallback_scores(site: Site, *, output_needed: bool, passes: bool) -> Stage:
    """Attention that torch writes out: Falcon-7B's over the whole stream, and row by row where a CPU drops out."""
    model, shape, e = site.model, site.shape, site.element_bytes
    whole = model.is_multi_query
    row_tokens, rows = (shape.tokens, 1) if whole else (shape.row_tokens, shape.rows)
    dropped = model.dropout.attention > 0
    kv_dim = _attended_kv_dim(site)
    common = {"tokens": shape.tokens, "q_dim": model.q_dim, "num_heads": model.num_heads, "element_bytes": e}
    sizes = {**common, "row_tokens": row_tokens, "hidden": model.hidden_size}
    kept = activations.fallback_attention_kept(
        **common, pairs=shape.tokens**2 if whole else shape.pairs(), kv_dim=kv_dim, output_needed=output_needed,
        dropped=dropped,
    )  # fmt: skip
    return Stage(
        name="attention",
        kept=kept if passes else 0,
        forward=transient.fallback_attention_forward(**sizes, kv_dim=kv_dim, dropped=dropped),
        backward=transient.fallback_attention_backward(
            **sizes, rows=rows, dropped=dropped, on_cuda=not site.plan.hardware.gpu.is_cpu
        ),
    )


def mlp_stages(
    site: Site, linears: Sequence[Linear], *, passes: bool, attention_passes: bool
) -> Iterator[Stage]:
    """``passes``: a gradient goes through its input; ``attention_passes``: through what attention adds beside it."""
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    inputs, down = linears[:-1], linears[-1:]
    h, f = model.hidden_size, model.intermediate_size
    gated = model.mlp_type == "gated"
    activation = ACTIVATIONS[model.activation]
    reaches = passes or site.trains(inputs)
    goes_back = reaches or site.trains(down)
    drops_sum = model.parallel_blocks and not model.dropout.attention_output and attention_passes
    waiting = (
        0 if norms_keep_input(site.plan) else 2 * t * e * h
    )  # the block's input, and what the MLP is added to
    unpacked = whole_weight_bytes(site, down)
    keeps_product = reaches and not gated and activation.keeps_output
    yield linears_stage(
        site, "MLP inputs", inputs,
        kept=0,
        forward=0,
        backward=transient.mlp_inputs_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, partial_gradients=2 if gated else 1
        ) + site.shared_dropout_gradient if reaches else 0,
        input_has_gradient=site.gradient_enters if model.parallel_blocks else passes,
    )  # fmt: skip
    if gated:
        kept, backward = _gate(site, inputs)
    else:
        kept = activations.plain_mlp_kept(tokens=t, width=f, element_bytes=e, activation=activation)
        backward = transient.activation_backward(
            tokens=t, hidden=h, width=f, element_bytes=e,
            tensors=max(activation.backward, 3 if site.adapted(down) else 0),
        )  # fmt: skip
    yield Stage(
        name="MLP activation",
        kept=kept if reaches else 0,
        forward=transient.mlp_forward(
            tokens=t, hidden=h, width=f, element_bytes=e,
            tensors=_tensors_at_once(site, inputs),
        ),
        backward=backward + site.shared_dropout_gradient if reaches else 0,
        again=transient.fused_mlp_again(
            tokens=t, hidden=h, width=f, element_bytes=e,
            kept=activations.gated_mlp_tensors_kept(activation, halves=True),
            adapted_output=bool(site.adapted(down)) and not model.dropout.mlp_output,
        )
        if _is_fused(site, inputs) and site.adapted(inputs)
        else 0,
        # the second half's base, low-rank output and this one scaled, of which one is kept
        making=waiting + 2 * t * e * f if gated and not site.fused and site.adapted(inputs[1:]) else 0,
    )  # fmt: skip
    yield linears_stage(
        site, "MLP output", down,
        kept=activations.linear_input_kept(
            tokens=t, size=f, element_bytes=e, needed=site.reads_input(down) and not keeps_product
        )
        + site.dropout_kept(model.dropout.mlp_output, passes=goes_back or drops_sum),
        forward=0,
        backward=transient.down_projection_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, adapted=not site.full
        ) + site.dropout_backward(model.dropout.mlp_output) if goes_back else 0,
        again=0 if keeps_product else _output_again(site, inputs, down),
        making=waiting + t * e * h + unpacked if goes_back and unpacked else 0,
    )  # fmt: skip


def _output_again(site: Site, inputs: Sequence[Linear], down: Sequence[Linear]) -> int:
    """0 where the product's input is kept: then going back takes more."""
    if site.reads_input(down):
        return 0
    kept_by_norm = site.element_bytes == FP32 or site.model.norm_type == "layer"
    return transient.mlp_output_again(
        tokens=site.shape.tokens, hidden=site.model.hidden_size, width=site.model.intermediate_size,
        element_bytes=site.element_bytes,
        others=bool(site.adapted(down)) + (not kept_by_norm) + (not site.reads_input(inputs)),
    )  # fmt: skip


def _gate(site: Site, inputs: Sequence[Linear]) -> tuple[int, int]:
    """Returns the bytes that the gated product keeps, and those of the worst moment of its backward."""
    sizes = {
        "tokens": site.shape.tokens,
        "width": site.model.intermediate_size,
        "element_bytes": site.element_bytes,
    }
    hidden, halves = site.model.hidden_size, _is_fused(site, inputs)
    if site.fused:
        kept = activations.fused_gated_mlp_kept(**sizes)
        return kept, transient.fused_gate_backward(**sizes, hidden=hidden, halves=halves)
    activation = ACTIVATIONS[site.model.activation]
    return (
        activations.gated_mlp_kept(**sizes, activation=activation, halves=halves),
        transient.gate_backward(**sizes, hidden=hidden, activation=activation, halves=halves),
    )


def _is_fused(site: Site, inputs: Sequence[Linear]) -> bool:
    """True if one linear makes gate and up (Phi-3)."""
    return site.model.mlp_type == "gated" and len(inputs) == 1


def _tensors_at_once(site: Site, inputs: Sequence[Linear]) -> int:
    adapted, activation = bool(site.adapted(inputs)), ACTIVATIONS[site.model.activation]
    if _is_fused(site, inputs):
        return max(6 if adapted else 4, activation.forward + 1)
    return max((3 if site.model.mlp_type == "gated" else 2) + adapted, activation.forward)
