"""The blocks of the model for one micro-batch, however its states are divided or offloaded: by formulas, or from a
traced profile in the same terms."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fitune.estimate.blocks.block import (
    Block,
    block_of,
    block_profile,
    final_norm_stage,
    traced_block,
    untouched_block,
)
from fitune.estimate.blocks.site import seen_by_kernel
from fitune.estimate.parameters import trains_in
from fitune.estimate.states import stepping_bytes
from fitune.spec.counts import untouched_blocks
from fitune.spec.model.block_profile import (
    Attention,
    BackwardPeak,
    BatchShape,
    BlockProfile,
    Extent,
    Moment,
    Pass,
    Size,
    Stage,
    TracedBlock,
    TracedMemory,
    TracedPass,
    in_all,
)
from fitune.spec.model.model_spec import BlockKind
from fitune.spec.model.tensors import kind_tensors
from fitune.spec.plan import Lora, Plan, trains_embeddings, updates_in_backward
from fitune.spec.remembered import remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The blocks of the model for one micro-batch: the same however its states are divided or offloaded."""

    blocks: tuple[BlockProfile, ...]
    """One for each block; those of one kind are the same object."""
    untouched: int
    final_norm: Stage
    around_traced: tuple[int, int, int] | None = None


def model_profile(plan: Plan, shape: BatchShape) -> ModelProfile:
    """The profile of a plan: up to eight kinds of blocks (adapters, a gradient that goes further back, a window)."""
    layers = plan.model.num_layers
    untouched = untouched_blocks(plan.model, plan.tuning)
    if plan.model.is_traced:
        return _traced_profile(plan, shape, untouched)
    kinds: dict[tuple[bool, bool, bool], BlockProfile] = {}
    blocks = []
    for index in range(layers):
        enters = trains_embeddings(plan.tuning) or index > untouched
        kind = (trains_in(plan, index), enters, plan.model.has_window(index))
        if kind not in kinds:
            kinds[kind] = block_profile(
                plan, shape, has_adapters=kind[0], gradient_enters=kind[1], has_window=kind[2]
            )
        blocks.append(kinds[kind])
    return ModelProfile(blocks=tuple(blocks), untouched=untouched, final_norm=final_norm_stage(plan, shape))


def _traced_profile(plan: Plan, shape: BatchShape, untouched: int) -> ModelProfile:
    """Backward ends at block ``untouched``. The final norm's gradients are all those outside of blocks and tables."""
    from fitune.spec.model.tracing import profile_for

    model, step = plan.model, profile_for(plan, shape)
    extent = step.extent(shape)
    as_block = partial(_traced_block, plan, extent, step.squares_stream)
    kinds = list(map(as_block, model.kinds, step.blocks))
    blocks = [kinds[number] for number in model.kind_of]
    if step.first is not None:
        blocks[untouched] = as_block(model.kinds[model.kind_of[untouched]], step.first)
    trained = 0 if isinstance(plan.tuning, Lora) else model.hidden_size * plan.precision.compute_bytes
    return ModelProfile(
        blocks=tuple(blocks),
        untouched=untouched,
        final_norm=Stage(
            name="final norm",
            kept=step.final_norm_kept.at(extent),
            forward=step.final_norm_forward.at(extent),
            backward=step.final_norm_backward.at(extent),
            gradients=trained,
            largest_gradient=trained,
        ),
        around_traced=(
            step.around.at(extent),
            (step.around_recomputed or step.around).at(extent),
            step.around_forward.at(extent),
        ),
    )


@remembered
def work_of(profile: ModelProfile) -> tuple[Pass, Pass]:
    """Work per token: forward of all blocks, backward of those that a gradient goes back through."""
    behind = profile.blocks[profile.untouched :]
    return (
        in_all((each.forward, times) for each, times in _kinds(profile.blocks)),
        in_all((each.backward, times) for each, times in _kinds(behind)),
    )


@remembered
def attentions_of(profile: ModelProfile) -> tuple[tuple[Attention, int, int], ...]:
    """Each kind of attention, the number of blocks that have it, and of those that a gradient goes back through."""
    all_blocks = Counter(block.attention for block in profile.blocks)
    behind = Counter(block.attention for block in profile.blocks[profile.untouched :])
    return tuple((each, count, behind[each]) for each, count in all_blocks.items())


def _kinds(blocks: tuple[BlockProfile, ...]) -> list[tuple[BlockProfile, int]]:
    """Each kind and how many there are of it; those of one kind are the same object."""
    kinds = {id(each): each for each in blocks}
    counts = Counter(map(id, blocks))
    return [(each, counts[key]) for key, each in kinds.items()]


@remembered
def memory_of_blocks(profile: ModelProfile, gradients_exist: bool) -> tuple[Block, ...]:
    """Memory of every block, in order; those of one kind are one object here, too."""
    kinds: dict[tuple[int, bool], Block] = {}
    blocks = []
    for index, block in enumerate(profile.blocks):
        kind = id(block), index >= profile.untouched
        if kind not in kinds:
            if not kind[1]:
                moments = [stage.forward for stage in block.stages]
                kinds[kind] = untouched_block(block.traced.forward if block.traced else max(moments))
            elif block.traced is not None:
                kinds[kind] = traced_block(block.traced, gradients_exist=gradients_exist)
            else:
                kinds[kind] = block_of(block.stages, gradients_exist=gradients_exist)
        blocks.append(kinds[kind])
    return tuple(blocks)


def _traced_block(
    plan: Plan, extent: Extent, squares_stream: bool, kind: BlockKind, block: TracedBlock
) -> BlockProfile:
    def most(sizes: Sequence[Size]) -> int:
        """The most bytes of ``sizes`` for this micro-batch."""
        return max(size.at(extent) for size in sizes)

    def worst(moments: Sequence[Moment]) -> BackwardPeak:
        """Bytes of the moment at which the most are alive in this micro-batch."""
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
        stepped = BackwardPeak(kept=kept, gradients=0, temporaries=own)
        return max(peak, stepped, key=lambda moment: moment.total)

    return BlockProfile(
        stages=(),
        forward=_pass(block.there, extent),
        backward=_pass(block.back, extent),
        attention=Attention(
            heads=block.heads,
            head_size=block.head_size,
            flops_per_pair=block.flops_per_pair,
            sees=seen_by_kernel(plan, plan.model.attention_of(kind.example)),
            over="written stream" if squares_stream else "rows",
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
