"""A decoder block: its stages by the architectures of families.py, and their sum over forward and backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fitune.estimate.blocks import activations, transient
from fitune.estimate.blocks.eager import block_passes
from fitune.estimate.blocks.experts import expert_stages
from fitune.estimate.blocks.site import Site, seen_by_kernel
from fitune.estimate.blocks.stages import attention_stages, mlp_stages
from fitune.spec.counts import attention_flops_per_pair
from fitune.spec.model.block_profile import (
    Attention,
    BackwardPeak,
    BatchShape,
    BlockProfile,
    Stage,
    TracedMemory,
)
from fitune.spec.model.model_spec import BlockAttention, Linear
from fitune.spec.model.traits import has_scores
from fitune.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The stages of one block in sum: all that the timeline asks of it."""

    kept: int
    gradients: int
    forward: int
    """The worst moment of its forward when nothing is kept."""
    building: int
    """The worst moment of its forward while what autograd keeps piles up."""
    peak: BackwardPeak
    recomputed_peak: BackwardPeak
    """The worst moment of its backward when its forward runs again first."""
    leaves: int = 0
    """Bytes that it leaves beyond an input of one hidden state when it is to run again (TracedBlock)."""


def untouched_block(forward: int) -> Block:
    """One that no gradient reaches: it keeps nothing and never goes back. ``forward``: bytes of its worst moment."""
    nothing = BackwardPeak(kept=0, gradients=0, temporaries=0)
    return Block(
        kept=0,
        gradients=0,
        forward=forward,
        building=0,
        peak=nothing,
        recomputed_peak=nothing,
    )


def traced_block(memory: TracedMemory, *, gradients_exist: bool) -> Block:
    """Bytes of a block from its trace. Its backward holds more where gradients of earlier micro-batches exist."""
    return Block(
        kept=memory.kept,
        gradients=memory.gradients,
        forward=memory.forward,
        building=memory.building,
        peak=memory.adding if gradients_exist else memory.backward,
        recomputed_peak=memory.recomputed_adding if gradients_exist else memory.recomputed,
        leaves=memory.leaves,
    )


def block_of(stages: Sequence[Stage], *, gradients_exist: bool) -> Block:
    """Bytes of a block, kept or recomputed: the sums and the worst moments of its stages."""
    peak, again = backward_peak(stages, gradients_exist=gradients_exist), _running_again(stages)
    kept = sum(stage.kept for stage in stages)
    holding = BackwardPeak(
        kept=kept, gradients=peak.gradients, temporaries=max(s.backward_holding for s in stages)
    )
    return Block(
        kept=kept,
        gradients=sum(stage.gradients for stage in stages),
        forward=max(stage.forward for stage in stages),
        peak=max(peak, holding, key=lambda moment: moment.total) if holding.temporaries else peak,
        building=_running_again(
            [replace(stage, again=max(stage.making, stage.again - stage.incoming)) for stage in stages]
        ).total,
        recomputed_peak=max(peak, again, key=lambda moment: moment.total),
    )


def backward_peak(stages: Sequence[Stage], *, gradients_exist: bool) -> BackwardPeak:
    """The worst moment of a block's backward, which goes from the last stage to the first.

    At stage j it holds what stages 0…j keep, its own temporaries, and the gradients of stages j…last. When they
    ``gradients_exist`` from an earlier micro-batch (the caller counts those), the fresh gradient of one
    parameter is a temporary until it is added in place.
    """
    kept = sum(stage.kept for stage in stages)
    gradients = 0
    worst: BackwardPeak | None = None
    for stage in reversed(stages):
        fresh = stage.largest_gradient if gradients_exist else 0
        gradients += 0 if gradients_exist else stage.gradients
        moment = BackwardPeak(kept=kept, gradients=gradients, temporaries=stage.backward + fresh)
        if worst is None or moment.total > worst.total:
            worst = moment
        kept -= stage.kept
    assert worst is not None
    return worst


def _running_again(stages: Sequence[Stage]) -> BackwardPeak:
    """The worst moment of the forward that a recomputed block repeats before it goes back."""
    kept = 0
    worst = BackwardPeak(kept=0, gradients=0, temporaries=0)
    for stage in stages:
        kept += stage.kept
        if stage.again and kept + stage.again > worst.total:
            worst = BackwardPeak(kept=kept, gradients=0, temporaries=stage.again)
    return worst


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
        over="written stream" if model.is_multi_query else by_row,
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
            *attention_stages(site, projections, output, passes=inside),
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
    if site.model.norms_per_block >= 4:
        yield _norm(site, name, passes=passes, read_by=())
