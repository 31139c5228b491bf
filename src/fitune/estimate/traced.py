"""A traced profile at one BatchShape: blocks, final norm and work in the terms that memory and time are made of."""

from collections.abc import Sequence

from fitune.estimate.blocks.site import seen_by_kernel
from fitune.estimate.states import stepping_bytes
from fitune.estimate.tensors import kind_tensors
from fitune.spec.model.block_profile import (
    Attention,
    BackwardPeak,
    BatchShape,
    BlockProfile,
    Pass,
    Stage,
    TracedMemory,
)
from fitune.spec.model.model_spec import BlockKind
from fitune.spec.model.traced_profile import Extent, Moment, Size, TracedBlock, TracedPass, TracedStep
from fitune.spec.plan import Lora, Plan, updates_in_backward


def traced_blocks(
    plan: Plan, step: TracedStep, shape: BatchShape, untouched: int
) -> tuple[BlockProfile, ...]:
    """The profile of every block; those of one kind are one object. Backward ends at block ``untouched``."""
    kinds = [
        _profile(plan, kind, traced, step, shape)
        for kind, traced in zip(plan.model.kinds, step.blocks, strict=True)
    ]
    blocks = [kinds[number] for number in plan.model.kind_of]
    if step.first is not None:
        kind = plan.model.kinds[plan.model.kind_of[untouched]]
        blocks[untouched] = _profile(plan, kind, step.first, step, shape)
    return tuple(blocks)


def traced_final_norm(plan: Plan, step: TracedStep, shape: BatchShape) -> Stage:
    """The norm after the last block; its gradients are all those outside of blocks and tables."""
    extent = step.extent(shape)
    trained = 0 if isinstance(plan.tuning, Lora) else plan.model.hidden_size * plan.precision.compute_bytes
    return Stage(
        name="final norm",
        kept=step.final_norm_kept.at(extent),
        forward=step.final_norm_forward.at(extent),
        backward=step.final_norm_backward.at(extent),
        gradients=trained,
        largest_gradient=trained,
    )


def _profile(
    plan: Plan, kind: BlockKind, block: TracedBlock, step: TracedStep, shape: BatchShape
) -> BlockProfile:
    extent = step.extent(shape)

    def most(sizes: Sequence[Size]) -> int:
        return max(size.at(extent) for size in sizes)

    def worst(moments: Sequence[Moment]) -> BackwardPeak:
        peaks = [
            BackwardPeak(
                kept=moment.kept.at(extent),
                gradients=round(moment.gradients),
                temporaries=moment.temporaries.at(extent),
            )
            for moment in moments
        ]
        return max(peaks, key=lambda peak: peak.total)

    kept = block.kept.at(extent)

    def adding(moments: Sequence[Moment]) -> BackwardPeak:
        """A gradient at a time beside resting ones; or its weight is stepped while all other temporaries are gone."""
        peak = worst(moments)
        if not updates_in_backward(plan.tuning):
            return peak
        largest = max(tensor.elements for tensor in kind_tensors(plan.model, plan.model.kinds.index(kind)))
        own = largest * plan.precision.compute_bytes + stepping_bytes(plan, largest)
        step = BackwardPeak(kept=kept, gradients=0, temporaries=own)
        return max(peak, step, key=lambda moment: moment.total)

    return BlockProfile(
        stages=(),
        forward=_pass(block.there, extent),
        backward=_pass(block.back, extent),
        attention=Attention(
            heads=block.heads,
            head_size=block.head_size,
            flops_per_pair=block.flops_per_pair,
            sees=seen_by_kernel(plan, plan.model.attention_of(kind.example)),
            over="written stream" if step.squares_stream else "rows",
        ),
        traced=TracedMemory(
            kept=kept,
            gradients=_gradient_elements(plan, kind) * plan.precision.compute_bytes,
            forward=most(block.forward),
            building=most(block.building),
            backward=worst(block.backward),
            adding=adding(block.adding),
            recomputed=worst(block.recomputed),
            recomputed_adding=adding(block.recomputed_adding),
            leaves=block.leaves.at(extent) if block.leaves else 0,
        ),
    )


def _gradient_elements(plan: Plan, kind: BlockKind) -> int:
    """Trained elements of one block."""
    if not isinstance(plan.tuning, Lora):
        return sum(m.parameters for m in kind.linears) + kind.other_parameters
    lora = plan.tuning
    return sum(
        lora.rank * (m.in_features + m.out_features) * m.copies + m.out_features * lora.dora
        for m in kind.linears
        if m.is_target(lora.targets)
    )


def _pass(traced: TracedPass, extent: Extent) -> Pass:
    return Pass(
        flops=traced.flops.at(extent) / extent.tokens,
        bytes=traced.bytes.at(extent) / extent.tokens,
        products=round(traced.products),
        operations=round(traced.operations),
    )
