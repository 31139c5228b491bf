"""A decoder block by the architectures of families.py: its profile, and the stages in the order they run. Mixtures:
experts.py."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from fitune.estimate.blocks.attention import attention_stages
from fitune.estimate.blocks.eager import block_passes
from fitune.estimate.blocks.experts import expert_stages
from fitune.estimate.blocks.mlp import mlp_stages
from fitune.estimate.blocks.site import FP32, Site, norm_kept, seen_by_kernel
from fitune.values.counts import attention_flops_per_pair
from fitune.values.model.block_profile import Attention, BatchShape, BlockProfile, Stage
from fitune.values.model.model_spec import BlockAttention, Linear
from fitune.values.model.traits import has_scores
from fitune.values.plan import Plan


def block_profile(
    plan: Plan, shape: BatchShape, *, gradient_enters: bool, has_adapters: bool, has_window: bool
) -> BlockProfile:
    """The profile of one kind of block, by the formulas of transformers' eager code."""
    model = plan.model
    forward, backward = block_passes(plan, has_adapters=has_adapters)
    by_row: Literal["rows", "written rows"] = "written rows" if has_scores(plan) else "rows"
    window = model.sliding_window if has_window else 0
    return BlockProfile(
        stages=block_stages(
            plan, shape, gradient_enters=gradient_enters, has_adapters=has_adapters, has_window=has_window
        ),
        forward=forward,
        backward=backward,
        attention=Attention(
            heads=model.num_heads,
            head_size=model.head_dim,
            flops_per_pair=attention_flops_per_pair(model.attention_of(0)),
            sees=seen_by_kernel(plan, BlockAttention(width=model.q_dim, window=window)),
            over="stream" if model.masks_whole_stream else by_row,
        ),
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
    site = Site(
        plan, shape, gradient_enters=gradient_enters, has_adapters=has_adapters, has_window=has_window
    )
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
    return _norm(Site(plan, shape), "final norm", passes=True)


def _norm(site: Site, name: str, *, passes: bool, read_by: Sequence[Linear] = ()) -> Stage:
    """A norm over the hidden size, with the input that the linears behind it share.

    Of transformers' RMSNorm forward has the residual and three fp32 tensors: a copy, its square, or the scaled copy
    before it is cast. Backward has the residual's gradient and five: the gradient through the scale, the spread-out
    gradient of the mean, and three factors of the square's derivative; less what the stage has let go of, the norm's
    output and what a trained weight multiplied. Liger's kernel makes nothing between: residual and output; as in a
    LayerNorm gradients of residual, output and input.
    """
    output_kept = bool(read_by) and site.reads_input(read_by)
    weights = (site.h if site.model.norm_type == "rms" else 2 * site.h) if site.full else 0
    in_fp32 = site.t * site.h * FP32
    if site.model.norm_type == "layer" or site.fused:
        holding, let_go = 3 * site.stream, 0
    else:
        holding, let_go = site.stream + 5 * in_fp32, site.t * site.h * site.scaled_bytes
    return Stage(
        name=name,
        kept=norm_kept(site, size=site.h, groups=1, passes=passes) + output_kept * site.stream,
        forward=2 * site.stream if site.fused else site.stream + 3 * in_fp32,
        backward=holding - output_kept * site.stream - let_go if passes or site.full else 0,
        backward_holding=holding if passes or site.full else 0,
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
    same_input = site.stream if passes or site.full else 0
    yield replace(norm, kept=norm.kept - same_input)  # both read the block's input


def _sandwich_norm(site: Site, name: str, *, passes: bool) -> Iterator[Stage]:
    """Gemma normalises what attention and MLP give back, before it is added."""
    if not site.norms_outputs:
        return
    norm = _norm(site, name, passes=passes)
    if norm.kept and not site.fused and site.e < FP32:
        # block's input, residual and the norm's input; the fp32 copy scaled twice, of which the first is kept where the
        # weight trains, and then the second is cast
        making = 3 * site.stream + site.t * site.h * (FP32 + (site.e if site.full else FP32))
        norm = replace(norm, making=making)
    yield norm
