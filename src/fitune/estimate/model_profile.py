"""The blocks of the model for one micro-batch, however its states are divided or offloaded."""

from collections import Counter
from dataclasses import dataclass

from fitune.estimate.blocks.block import (
    Block,
    block_of,
    block_profile,
    final_norm_stage,
    traced_block,
    untouched_block,
)
from fitune.estimate.parameters import trains_in
from fitune.spec.counts import untouched_blocks
from fitune.spec.model.block_profile import Attention, BatchShape, BlockProfile, Pass, Stage, in_all
from fitune.spec.plan import Plan, trains_embeddings
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
    from fitune.estimate.traced import traced_blocks, traced_final_norm
    from fitune.spec.model.tracing import profile_for

    step = profile_for(plan, shape)
    extent = step.extent(shape)
    return ModelProfile(
        blocks=traced_blocks(plan, step, shape, untouched),
        untouched=untouched,
        final_norm=traced_final_norm(plan, step, shape),
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
