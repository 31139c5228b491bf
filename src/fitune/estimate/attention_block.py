"""The attention half of a block: projections, the attention itself, output projection."""

from collections.abc import Iterator, Sequence

from fitune.estimate import activations, transient
from fitune.estimate.attention_traits import (
    attended_kv_dim,
    attends_in_one_call,
    is_multi_query,
    kept_kv_dim,
    masks_whole_stream,
    masks_window,
    materialises_scores,
    values_are_read_as_projected,
    windowed_blocks,
)
from fitune.estimate.site import SCALED_IN_FP32, Site, linears_stage
from fitune.estimate.stages import Stage
from fitune.spec.model import Linear


def attention_stages(
    site: Site, projections: Sequence[Linear], output: Sequence[Linear], *, passes: bool
) -> Iterator[Stage]:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    sizes = {"hidden": model.hidden_size, "q_dim": model.q_dim, "kv_dim": attended_kv_dim(site.plan)}
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
        kept=0,
        forward=0,
        backward=transient.output_projection_backward(
            tokens=t, hidden=model.hidden_size, q_dim=model.q_dim, element_bytes=e, adapted=not site.full
        ),
    )  # fmt: skip


def _queries_keys_values(site: Site, projections: Sequence[Linear]) -> int:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    rotary = model.learned_positions == 0
    if is_multi_query(model):
        kept = 0  # attention keeps fp32 copies of its own
    elif materialises_scores(site.plan):
        kept = activations.queries_kept(
            tokens=t, q_dim=model.q_dim, kv_dim=model.kv_dim, element_bytes=e, rotary=rotary
        )
    else:
        kept = activations.queries_keys_values_kept(
            tokens=t, q_dim=model.q_dim, kv_dim=kept_kv_dim(site.plan), element_bytes=e,
            rotary=rotary, fused=len(projections) == 1 and values_are_read_as_projected(site.plan),
        )  # fmt: skip
    if model.qk_norm == "none":
        return kept
    size, groups = model.q_dim + model.kv_dim, model.num_heads + model.num_kv_heads
    if site.fused:
        return kept + activations.fused_rms_norm_kept(
            tokens=t, size=size, groups=groups, element_bytes=e, gradient_passes=True, trained=site.full
        )
    norm = activations.rms_norm_kept(
        tokens=t, size=size, groups=groups, element_bytes=e,
        gradient_passes=True, trained=site.full, scaled_in_fp32=model.model_type in SCALED_IN_FP32,
    )  # fmt: skip
    return kept + norm


def _scores(site: Site, output: Sequence[Linear], *, passes: bool) -> Stage:
    """Attention itself: fused, or written out."""
    model, shape, e = site.model, site.shape, site.element_bytes
    rows = 1 if masks_whole_stream(model) or attends_in_one_call(site.plan) else shape.rows
    common = {"tokens": shape.tokens, "q_dim": model.q_dim, "num_heads": model.num_heads}
    needed = site.reads_input(output)
    if is_multi_query(model):
        return _multi_query_scores(site, output_needed=needed, passes=passes)
    if materialises_scores(site.plan):
        kept = activations.eager_attention_kept(
            **common, row_tokens=shape.row_tokens, element_bytes=e, output_needed=needed,
            softcapped=model.model_type == "gemma2",
        )  # fmt: skip
        sizes = {**common, "row_tokens": shape.row_tokens, "hidden": model.hidden_size, "element_bytes": e}
        return Stage(
            name="attention",
            kept=kept if passes else 0,
            forward=transient.eager_attention_forward(**sizes, softcapped=model.model_type == "gemma2"),
            backward=transient.eager_attention_backward(**sizes, rows=rows) if passes else 0,
        )
    kept = activations.fused_attention_kept(**common, rows=rows, element_bytes=e, output_needed=needed)
    backward = transient.fused_attention_backward(
        **common, rows=rows, hidden=model.hidden_size, kv_dim=attended_kv_dim(site.plan), element_bytes=e,
        on_cuda=not site.plan.hardware.gpu.is_cpu,
    )  # fmt: skip
    making_mask = 0
    if masks_window(site.plan):
        mask = activations.window_mask_kept(tokens=shape.tokens, row_tokens=shape.row_tokens, element_bytes=e)
        kept += mask * windowed_blocks(model) // model.num_layers
        making_mask = transient.window_mask_making(row_tokens=shape.row_tokens)
    return Stage(
        name="attention",
        kept=kept if passes else 0,
        forward=making_mask,
        backward=backward if passes else 0,
    )


def _multi_query_scores(site: Site, *, output_needed: bool, passes: bool) -> Stage:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    kept = activations.multi_query_attention_kept(
        tokens=t, q_dim=model.q_dim, kv_dim=model.kv_dim, num_heads=model.num_heads, element_bytes=e,
        output_needed=output_needed,
    )  # fmt: skip
    working = transient.multi_query_attention_working(
        tokens=t, num_heads=model.num_heads, hidden=model.hidden_size, element_bytes=e
    )
    return Stage(name="attention", kept=kept if passes else 0, forward=3 * working // 2, backward=working)
