"""The blocks of the model for one micro-batch, however its states are divided or offloaded: by formulas, or from a
traced profile in the same terms; and the bytes of each in sum."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fitune.estimate.blocks.block import block_profile, final_norm_stage
from fitune.estimate.blocks.site import seen_by_kernel
from fitune.estimate.parameters import trains_in
from fitune.estimate.states import stepping_bytes
from fitune.values.counts import kind_tensors, trained_of_kind, untouched_blocks
from fitune.values.model.block_profile import (
    Attention,
    BackwardPeak,
    BatchShape,
    Block,
    BlockProfile,
    Extent,
    Moment,
    Pass,
    Size,
    Stage,
    TracedBackward,
    TracedBlock,
    TracedPass,
    in_all,
)
from fitune.values.model.model_spec import BlockKind
from fitune.values.plan import Lora, Plan, trains_embeddings, updates_in_backward
from fitune.values.remembered import remembered


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
    from fitune.values.model.tracing import profile_for

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

    kept, number = block.kept.at(extent), plan.model.kinds.index(kind)
    e, trained = plan.precision.compute_bytes, trained_of_kind(plan, number)

    def memory(
        backward: Sequence[Moment], recomputed: Sequence[Moment], *, stepped: int | None = None
    ) -> Block:
        """Bytes at the worst moments. ``stepped``: bytes while the largest gradient is stepped, one moment more; None:
        no gradient exists yet."""
        peaks = [worst(backward), worst(recomputed)]
        if stepped is not None:
            step = BackwardPeak(kept=kept, gradients=0, temporaries=stepped)
            peaks = [_larger(peak, step) for peak in peaks]
        return Block(
            kept=kept,
            gradients=e * sum(each.elements * each.count for each in trained),
            forward=most(block.forward),
            building=most(block.building),
            peak=peaks[0],
            recomputed_peak=peaks[1],
            leaves=block.leaves.at(extent) if block.leaves else 0,
        )

    largest = max(tensor.elements for tensor in kind_tensors(plan.model, number))
    stepped_bytes = largest * e + stepping_bytes(plan, largest) if updates_in_backward(plan.tuning) else 0
    adding = block.adding, block.recomputed_adding
    return BlockProfile(
        stages=(),
        forward=_pass(block.there, extent),
        backward=_pass(block.back, extent),
        attention=Attention(
            heads=block.heads,
            head_size=block.head_size,
            flops_per_pair=block.flops_per_pair,
            sees=seen_by_kernel(plan, plan.model.attention_of(kind.example)),
            over="stream" if squares_stream else "rows",
        ),
        traced=TracedBackward(
            making=memory(block.backward, block.recomputed),
            adding=memory(*adding, stepped=stepped_bytes),
            measuring=memory(*adding, stepped=0),
        ),
    )


def _pass(traced: TracedPass, extent: Extent) -> Pass:
    return Pass(
        flops=traced.flops.at(extent) / extent.tokens,
        bytes=traced.bytes.at(extent) / extent.tokens,
        products=round(traced.products),
        operations=round(traced.operations),
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
def memory_of_blocks(
    profile: ModelProfile, gradients_exist: bool, *, measuring: bool = False
) -> tuple[Block, ...]:
    """Memory of every block, in order; those of one kind are one object here, too. In a ``measuring`` backward, the
    first of two, nothing that blocks keep is let go of, and nothing is stepped.
    """
    kinds: dict[tuple[int, bool], Block] = {}
    blocks = []
    for index, block in enumerate(profile.blocks):
        untouched = index < profile.untouched
        kind = id(block), untouched
        if kind not in kinds:
            kinds[kind] = _memory_of(
                block, untouched=untouched, gradients_exist=gradients_exist, measuring=measuring
            )
        blocks.append(kinds[kind])
    return tuple(blocks)


def _memory_of(block: BlockProfile, *, untouched: bool, gradients_exist: bool, measuring: bool) -> Block:
    """Bytes of one block by its stages or its trace. One that no gradient reaches keeps nothing and never goes back; a
    traced one's backward holds more where gradients of earlier micro-batches exist."""
    if untouched:
        nothing = BackwardPeak(kept=0, gradients=0, temporaries=0)
        forward = max(part.forward for part in block.traced or block.stages)
        return Block(kept=0, gradients=0, forward=forward, building=0, peak=nothing, recomputed_peak=nothing)
    if block.traced is None:
        return _by_stages(block.stages, gradients_exist=gradients_exist, measuring=measuring)
    if not gradients_exist:
        return block.traced.making
    return block.traced.measuring if measuring else block.traced.adding


def _by_stages(stages: Sequence[Stage], *, gradients_exist: bool, measuring: bool) -> Block:
    """Bytes of a block, kept or recomputed: the sums and the worst moments of its stages."""
    again = _running_again(stages)
    let_go = [replace(stage, backward=stage.backward - stage.gone_again) for stage in stages]
    steps = not measuring
    return Block(
        kept=sum(stage.kept for stage in stages),
        gradients=sum(stage.gradients for stage in stages),
        forward=max(stage.forward for stage in stages),
        peak=_backward_peak(stages, gradients_exist=gradients_exist, steps=steps, holds=measuring),
        building=_running_again(
            [replace(stage, again=max(stage.making, stage.again - stage.incoming)) for stage in stages]
        ).total,
        recomputed_peak=_larger(_backward_peak(let_go, gradients_exist=gradients_exist, steps=steps), again),
    )


def _backward_peak(
    stages: Sequence[Stage], *, gradients_exist: bool, steps: bool, holds: bool = False
) -> BackwardPeak:
    """The worst moment of a block's backward, which goes from the last stage to the first.

    At stage j it holds what stages 0…j keep (``holds``: what all keep), its own temporaries, and the gradients of
    stages j…last. When they ``gradients_exist`` from an earlier micro-batch (the caller counts those), the fresh
    gradient of one parameter is a temporary until it is added in place or, where it ``steps``, used.
    """
    kept = sum(stage.kept for stage in stages)
    gradients = 0
    worst = BackwardPeak(kept=0, gradients=0, temporaries=0)
    for stage in reversed(stages):
        fresh = max(stage.largest_gradient, stage.stepped if steps else 0) if gradients_exist else 0
        gradients += 0 if gradients_exist else stage.gradients
        own = max(stage.backward + fresh, stage.backward_holding if holds else 0)
        worst = _larger(worst, BackwardPeak(kept=kept, gradients=gradients, temporaries=own))
        kept -= 0 if holds else stage.kept
    return worst


def _larger(one: BackwardPeak, other: BackwardPeak) -> BackwardPeak:
    return other if other.total > one.total else one


def _running_again(stages: Sequence[Stage]) -> BackwardPeak:
    """The worst moment of the forward that a recomputed block repeats before it goes back."""
    kept = 0
    worst = BackwardPeak(kept=0, gradients=0, temporaries=0)
    for stage in stages:
        kept += stage.kept
        if stage.again and kept + stage.again > worst.total:
            worst = BackwardPeak(kept=kept, gradients=0, temporaries=stage.again)
    return worst
