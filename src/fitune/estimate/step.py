"""One optimizer step described for the timeline: its stages, its shape, what stays in memory throughout."""

from dataclasses import dataclass, replace
from itertools import accumulate

from fitune.estimate.blocks.site import FP32, INDEX, dropout_mask_bytes
from fitune.estimate.buffers import Buffers, buffers_of
from fitune.estimate.division import trained_share, uses_deepspeed, uses_fsdp
from fitune.estimate.model_profile import (
    ModelProfile,
    attentions_of,
    memory_of_blocks,
    model_profile,
    work_of,
)
from fitune.estimate.parameters import (
    adapters_bytes,
    gradients_bytes,
    head_parameters,
    unpacking_bytes,
    weights_on_device_bytes,
    weights_read_bytes,
)
from fitune.estimate.states import (
    gradients_always_exist,
    master_bytes,
    one_gradient_at_a_time,
    optimizer_bytes,
    resting_gradient_bytes,
    root_gradients_wait,
    update_gradient_bytes,
    update_temporaries_bytes,
)
from fitune.values.model.block_profile import Attention, BatchShape, Block, Pass, Stage
from fitune.values.model.traits import writes_stream_scores
from fitune.values.plan import (
    Loss,
    Plan,
    Recompute,
    trains_embeddings,
    trains_every_weight,
    trains_head,
    updates_in_backward,
)
from fitune.values.remembered import remembered

Terms = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStages:
    """The blocks of one micro-batch and the sizes the phases share."""

    plan: Plan
    shape: BatchShape
    num_layers: int
    recomputed: int
    """Number of first blocks that run again in backward."""
    blocks: tuple[Block, ...]
    """Memory of every block, counted from 0 at the embedding; of up to eight kinds (``model_profile``)."""
    forward: Pass
    backward: Pass
    """Work per token: forward of all blocks, backward of those that a gradient goes back through."""
    attentions: tuple[tuple[Attention, int, int], ...]
    """Each kind of attention, its blocks, and those of them that a gradient goes back through."""
    measured_blocks: tuple[Block, ...]
    """Memory of every block in a first backward that only measures the gradients' norm; empty where a step goes back
    once (``Plan.goes_back_twice``)."""
    kept_by_blocks: tuple[int, ...]
    """Bytes that the blocks 0…index−1 keep when none recomputes."""
    left_by_blocks: tuple[int, ...]
    """Bytes that the blocks 0…index−1 leave beyond their inputs when all recompute."""
    gradients_of_blocks: tuple[int, ...]
    """Cumulative bytes of the gradients that the blocks 0…index−1 leave."""
    untouched: int
    """Number of first blocks that no gradient reaches."""
    run_ends: frozenset[int]
    """Blocks of another kind than one beside them, and the outer ones."""
    final_norm: Stage
    resident: Terms
    gradients: int
    """Bytes of gradients on the device when backward is through: all, the rank's share, or none."""
    gradients_exist: bool
    """Before backward: from the second micro-batch on, always with DDP, never where they are used in backward."""
    root_waits: bool
    """Head and final norm keep whole gradients to the end of backward, although the blocks' do not stay."""
    whole_gradients: int
    """All of them, whole."""
    buffers: Buffers
    weights_read: int
    """Bytes of the blocks' weights, as one pass over them reads."""
    copied_out: int
    """More of them moved where a pass copies them out of a buffer that they were gathered in."""
    unpacked: int
    """More of them where packed weights are made whole first."""
    stepped: int
    """Elements that this device updates, once backward is through or in it."""
    update: Terms
    """Bytes that the update holds beside those that stay."""
    element_bytes: int
    """e, of one element in the compute type."""
    hidden: int
    """The last hidden state, t · e · h, with e of the residual stream; also the size of a block's input, all that a
    recomputed block keeps (Chen et al. 2016, arXiv 1604.06174), and of their gradients."""
    head_gradient: int
    """A whole gradient of the head; 0 where it is frozen."""
    activations_leave: bool
    """Activations that blocks keep wait on the host."""
    logit_bytes: int = 0
    """Alive for each logit of another trainer's loss, of all tokens or of a chunk; 0: fitune's loss."""
    fp32_stream: bool = False
    """The residual stream is fp32 whatever is computed in; ``hidden`` counts it so."""
    held_behind: int = 0
    """Input and its gradient that each block leaves behind until backward is through."""
    weight_copies: int = 0
    """16-bit copies of fp32 weights, from forward until the block that used them has gone back."""
    around_traced: tuple[int, int, int] | None = None
    """Bytes alive around the blocks of a traced model: in backward, there where a block recomputes, in forward; None
    for a model with formulas."""
    casts: tuple[float, float] = (0.0, 0.0)
    """Bytes per token that casts move beside the model's own operations, forward and backward, in all blocks."""

    @property
    def full(self) -> bool:
        """True if every weight trains (full, LOMO)."""
        return trains_every_weight(self.plan.tuning)

    @property
    def gradients_before(self) -> int:
        """Left by earlier micro-batches."""
        return self.gradients if self.gradients_exist else 0

    @property
    def adds_in_place(self) -> bool:
        """A fresh gradient is added to a whole one that is there already."""
        return self.gradients_exist and self.gradients == self.whole_gradients

    def settled(self, gradients: int) -> int:
        """Bytes left of whole gradients once they are divided, carried off or used."""
        if self.gradients == self.whole_gradients:
            return gradients
        return gradients * self.gradients // self.whole_gradients

    def gathered_in_backward(self, index: int) -> int:
        """Whole weights while block ``index`` goes back."""
        ahead = self.buffers.backward_ahead if index > 0 else 0
        return self.buffers.backward + ahead + sum(self.buffers.backward_blocks[: index + 1])

    def kept_before(self, index: int) -> int:
        """Bytes that the blocks 0…index−1 keep, those that recompute left out.

        When activations leave, only block index−1's is still or already on the device: engine/offload.py.
        """
        if self.activations_leave:
            return self.blocks[index - 1].kept if index > self.recomputed else 0
        return self.kept_by_blocks[index] - self.kept_by_blocks[min(index, self.recomputed)]

    def inputs_before(self, index: int) -> int:
        """The inputs that the recomputed ones of blocks 0…index−1 keep; of the last alone when they leave."""
        if self.activations_leave:
            return self.own_input(index - 1) if index > 0 else 0
        end = min(index, self.recomputed)
        start = min(end, self.untouched)
        return (end - start) * self.hidden + self.left_by_blocks[end] - self.left_by_blocks[start]

    def own_input(self, index: int) -> int:
        """The input that block ``index`` keeps when it recomputes."""
        recomputes = self.untouched <= index < self.recomputed
        return self.hidden + self.blocks[index].leaves if recomputes else 0

    def all_kept(self) -> Terms:
        """Bytes that all blocks and the final norm keep when forward is through."""
        return {
            "activations": self.kept_before(self.num_layers) + self.final_norm.kept,
            "recompute inputs": self.inputs_before(self.num_layers),
        }

    def around(self, *, in_forward: bool = False) -> Terms:
        """The micro-batch itself, the rotary table that every block reads, and a mask over the stream.

        That mask lives through forward; then until backward if a block keeps it: to run again, or in fused attention.
        """
        model, tokens = self.plan.model, self.shape.tokens
        if self.around_traced is not None:
            backward, recomputed, forward = self.around_traced
            after = recomputed if self.recomputed > self.untouched else backward
            return {"batch": 3 * INDEX * tokens + (forward if in_forward else after)}
        table = (
            2 * tokens * round(model.head_dim * model.rotary_share) * self.element_bytes
        )  # cosines and sines
        mask = tokens**2 * self.element_bytes  # architectures with their own attention build it once
        dropped = model.dropout.embedding and trains_embeddings(self.plan.tuning)
        dropout_mask = tokens * model.hidden_size * dropout_mask_bytes(self.plan)
        keeps_mask = in_forward or self.recomputed > self.untouched or not writes_stream_scores(self.plan)
        return {
            "batch": 3 * INDEX * tokens
            + (0 if model.learned_positions else table)
            + (mask if model.masks_whole_stream and keeps_mask else 0),
            "embedding dropout": dropout_mask if dropped else 0,
        }

    @remembered
    def varied(self, blocks: int, loss: Loss) -> "StepStages":
        """This step with so many blocks recomputed and that loss: a search tries these most, again and again."""
        plan = replace(self.plan, recompute=Recompute(blocks=blocks), loss=loss)
        return replace(self, plan=plan, recomputed=min(blocks, self.num_layers))


def describe_step(plan: Plan, shape: BatchShape, profile: ModelProfile | None = None) -> StepStages:
    """The parts of a step that memory_of needs and that do not depend on recompute or loss.

    A search over ways to divide the states hands in the ``profile`` that all of them share.
    """
    profile = profile or model_profile(plan, shape)
    at_a_time = one_gradient_at_a_time(plan)
    blocks = memory_of_blocks(profile, at_a_time)
    forward, backward = work_of(profile)
    e = plan.precision.compute_bytes
    return StepStages(
        plan=plan,
        shape=shape,
        num_layers=plan.model.num_layers,
        recomputed=min(plan.recompute.blocks, plan.model.num_layers),
        blocks=blocks,
        measured_blocks=memory_of_blocks(profile, at_a_time, measuring=True) if plan.goes_back_twice else (),
        kept_by_blocks=(0, *accumulate(block.kept for block in blocks)),
        left_by_blocks=(0, *accumulate(block.leaves for block in blocks)),
        gradients_of_blocks=(0, *accumulate(block.gradients for block in blocks)),
        forward=forward,
        backward=backward,
        attentions=attentions_of(profile),
        untouched=profile.untouched,
        run_ends=_run_ends(blocks),
        final_norm=profile.final_norm,
        around_traced=profile.around_traced,
        resident=resident_terms(plan),
        gradients=resting_gradient_bytes(plan),
        gradients_exist=not updates_in_backward(plan.tuning)
        and (plan.batch.accumulation > 1 or gradients_always_exist(plan)),
        root_waits=root_gradients_wait(plan),
        whole_gradients=gradients_bytes(plan),
        buffers=buffers_of(plan),
        update={"gradients": update_gradient_bytes(plan), "temporaries": update_temporaries_bytes(plan)},
        weights_read=weights_read_bytes(plan),
        copied_out=2 * weights_read_bytes(plan) if uses_fsdp(plan) else 0,  # read and written
        unpacked=unpacking_bytes(plan),
        stepped=trained_share(plan) if plan.offload.optimizer == "device" else 0,
        element_bytes=e,
        hidden=shape.tokens * plan.model.hidden_size * (FP32 if plan.model.fp32_stream else e),
        head_gradient=e * head_parameters(plan.model) if trains_head(plan.tuning) else 0,
        activations_leave=plan.offload.activations != "device",
    )


def before_states(step: StepStages) -> StepStages:
    """The first step of a run, whose update makes the optimizer's states. DeepSpeed makes them before it, and updates
    in backward make them there: for these the step is as any other."""
    if uses_deepspeed(step.plan) or updates_in_backward(step.plan.tuning):
        return step
    states = step.resident["optimizer"]
    return replace(
        step, resident={**step.resident, "optimizer": 0}, update={**step.update, "optimizer": states}
    )


def _run_ends(blocks: tuple[Block, ...]) -> frozenset[int]:
    last = len(blocks) - 1
    changes = (index for index in range(last) if blocks[index] is not blocks[index + 1])
    return frozenset({0, last}) | {end for index in changes for end in (index, index + 1)}


def resident_terms(plan: Plan) -> Terms:
    """Bytes that stay between two steps: weights and tables beside them, adapters, fp32 masters, optimizer states."""
    return {
        "weights": weights_on_device_bytes(plan) + plan.model.table_bytes,
        "adapters": adapters_bytes(plan),
        "masters": master_bytes(plan),
        "optimizer": optimizer_bytes(plan),
    }
