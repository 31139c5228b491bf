"""The plan to try after a step ran out of memory; where none is smaller, changes for the user to decide.

All of them are computed: a change is named only if the plan with it was predicted to take less.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from fitune.errors import Shortage
from fitune.estimate.memory import memory_of
from fitune.estimate.predict import largest_batch, predict_memory
from fitune.estimate.step import StepStages, describe_step
from fitune.planner.candidates import block_counts, losses
from fitune.planner.defaults import CHUNK_TOKENS, optimizer_of
from fitune.planner.fit import cheapest_blocks, fewest_blocks, preferred
from fitune.planner.methods import lora_of, packed_base, to_adapters
from fitune.recipe.recipe import Recipe
from fitune.values.plan import (
    Batch,
    ChunkedLoss,
    ClipByNorm,
    Dense,
    Full,
    InBackward,
    Lora,
    Loss,
    Plan,
    Recompute,
    Single,
    trains_every_weight,
)
from fitune.values.predictions import WORKSPACE, MemoryBreakdown, Phase
from fitune.values.rules import adds_gradients_up, keeps_rules
from fitune.values.words import describe_loss


def smaller_plan(failed: Plan, recipe: Recipe, shortage: Shortage) -> Plan | None:
    """The plan to try next; None when no smaller micro-batch takes less where memory ran out (``why_no_smaller``).

    The largest micro-batch that has room by what is known now, with the fewest recomputed blocks and the largest
    logits that do; where none has, the plan that takes least.
    """
    known = Known.of(failed, shortage)
    smallest: StepStages | None = None
    for batch in smaller_batches(failed):
        plan = replace(failed, batch=batch)
        step = describe_step(plan, largest_batch(plan))
        fitting = _fastest(step, recipe, failed, room=known.room)
        if fitting is not None and known.is_less(memory_of(fitting)):
            return fitting.plan
        loss = _losses(recipe, failed)[-1]
        smallest = step.varied(cheapest_blocks(partial(_peak, step, loss), _counts(recipe, failed)), loss)
    if smallest is not None and known.is_less(memory_of(smallest)):
        return smallest.plan
    return None


def why_no_smaller(failed: Plan, shortage: Shortage) -> str:
    """Reason why ``smaller_plan`` finds no plan, in words."""
    if not adds_gradients_up(failed.tuning):
        return (
            "the micro-batch is the whole batch: gradients are used as soon as they exist and cannot be added up "
            "over several micro-batches"
        )
    if failed.batch.micro_batch_size == 1:
        return "the micro-batch is one row already"
    return f"what {shortage.doing} takes does not depend on the micro-batch"


def describe_size(plan: Plan) -> str:
    """Settings of a retry: ``micro_batch_size 2 × 4 accumulated, 0 of 32 blocks recomputed, plain loss``."""
    batch = plan.batch
    return (
        f"micro_batch_size {batch.micro_batch_size} × {batch.accumulation} accumulated, {plan.recompute.blocks} of "
        f"{plan.model.num_layers} blocks recomputed, {describe_loss(plan.loss)}"
    )


def smaller_batches(plan: Plan) -> Iterator[Batch]:
    """Half the rows with twice the accumulation, a quarter, … one; an odd number is divided as it can be."""
    batch = plan.batch
    while adds_gradients_up(plan.tuning) and (rows := batch.micro_batch_size) > 1:
        rows = next(m for m in range(rows // 2, 0, -1) if rows % m == 0)
        batch = replace(batch, micro_batch_size=rows, accumulation=batch.global_batch_size // rows)
        yield batch


MEASURED = ("live tensors", "cuda allocated")
"""Kinds of measuring that count what the estimate counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Limits of the next plan, in bytes of tensors as the estimate counts them."""

    failed: MemoryBreakdown
    phase: Phase | None
    """The phase in which memory ran out; None: between two steps."""
    room: int

    @classmethod
    def of(cls, failed: Plan, shortage: Shortage) -> "Known":
        """Room is what the device had over how much more the step needed than was thought, and less than what failed.

        Where it is not known what the device had, the plan that failed is all there is to go by.
        """
        memory = predict_memory(failed)
        phase = next((phase for phase in Phase if phase.value == shortage.doing), None)
        room = memory.tensor_peak_bytes - 1
        if shortage.kind in MEASURED and shortage.capacity_bytes:
            thought = memory.tensor_peak_bytes if phase is None else sum(memory.phases[phase].values())
            if shortage.kind == "cuda allocated":
                thought += memory.outside.get(WORKSPACE, 0)
            needed = shortage.in_use_bytes + shortage.asked_bytes
            room = min(room, int(shortage.capacity_bytes / max(1.0, needed / thought)))
        return cls(failed=memory, phase=phase, room=room)

    def is_less(self, memory: MemoryBreakdown) -> bool:
        """Less at the peak, and less where memory ran out."""
        if memory.tensor_peak_bytes >= self.failed.tensor_peak_bytes:
            return False
        phase = self.phase
        return phase is None or sum(memory.phases[phase].values()) < sum(self.failed.phases[phase].values())


def _fastest(step: StepStages, recipe: Recipe, failed: Plan, *, room: int) -> StepStages | None:
    fitting = []
    counts = _counts(recipe, failed)
    for loss in _losses(recipe, failed):
        blocks = fewest_blocks(partial(_peak, step, loss), counts, usable=room)
        if blocks is not None:
            fitting.append(step.varied(blocks, loss))
    return preferred(fitting, by=lambda one: memory_of(one).tensor_peak_bytes) if fitting else None


def _peak(step: StepStages, loss: Loss, blocks: int) -> int:
    return memory_of(step.varied(blocks, loss)).tensor_peak_bytes


def _counts(recipe: Recipe, failed: Plan) -> range:
    """No fewer recomputed blocks than before; a pinned number stays."""
    blocks, allowed = failed.recompute.blocks, block_counts(recipe, layers=failed.model.num_layers)
    return range(blocks, max(blocks + 1, allowed.stop))


def _losses(recipe: Recipe, failed: Plan) -> tuple[Loss, ...]:
    """No larger logits than before; the failed plan's first."""
    tokens = failed.loss.chunk_tokens if isinstance(failed.loss, ChunkedLoss) else None
    smaller = (
        loss
        for loss in losses(recipe)
        if isinstance(loss, ChunkedLoss) and (tokens is None or loss.chunk_tokens < tokens)
    )
    return (failed.loss, *smaller)


def next_to_try(failed: Plan, recipe: Recipe, shortage: Shortage) -> dict[str, int]:
    """Settings to change, in words, and the predicted peak bytes of tensors: those, after memory ran out, that take
    less at the peak and where it ran out, and can be trained. First those that cost time, then those that cost
    quality."""
    known = Known.of(failed, shortage)
    allowed = {
        words: predict_memory(plan)
        for words, plan in _changes(failed, recipe)
        if keeps_rules(plan, "plan", "train")
    }
    return {words: memory.tensor_peak_bytes for words, memory in allowed.items() if known.is_less(memory)}


def _changes(failed: Plan, recipe: Recipe) -> Iterator[tuple[str, Plan]]:
    """Plans with the same arithmetic in less room, each on top of the one before; then one other change on top."""
    words, plan, smallest = "", failed, min(CHUNK_TOKENS)
    if not isinstance(plan.loss, ChunkedLoss) or plan.loss.chunk_tokens > smallest:
        plan = replace(plan, loss=ChunkedLoss(chunk_tokens=smallest))
        words = f"loss: chunked, loss_chunk_tokens: {smallest}"
        yield words, plan
    if plan.recompute.blocks < plan.model.num_layers:
        plan = replace(plan, recompute=Recompute(blocks=plan.model.num_layers))
        words = ", ".join(filter(None, (words, "gradient_checkpointing: true")))
        yield words, plan
    for more, other in (*_elsewhere(plan), *_other_method(plan, recipe), *_fewer_tokens(plan)):
        yield ", ".join(filter(None, (words, more))), other


def _elsewhere(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Gradients that are used as soon as they exist, clipped alike; states and activations on the host."""
    offload = plan.offload
    gathers = plan.tuning == Full() and offload.optimizer == "device"
    if gathers and isinstance(plan.sharding, Single) and plan.batch.accumulation == 1:
        clip = ClipByNorm(max_norm=plan.schedule.max_grad_norm)
        yield "optimizer_in_backward: true", replace(plan, tuning=Full(update=InBackward(clip=clip)))
    if plan.hardware.gpu.is_cpu:
        return
    if offload.activations == "device":
        yield "offload_activations: cpu", replace(plan, offload=replace(offload, activations="cpu"))
    stepping = replace(offload, optimizer="cpu") if offload.optimizer == "device" else offload
    if stepping != offload:
        yield "offload_optimizer: cpu", replace(plan, offload=stepping)
    if offload.parameters == "device":
        both = replace(stepping, parameters="cpu")
        yield "offload_parameters: cpu, offload_optimizer: cpu", replace(plan, offload=both)


def _other_method(plan: Plan, recipe: Recipe) -> Iterator[tuple[str, Plan]]:
    """An adapter in place of all weights, four bits in place of sixteen."""
    if trains_every_weight(plan.tuning):
        lora = lora_of(recipe, plan.model, Dense())
        run = replace(plan.run, export="adapter")
        plan = replace(plan, tuning=lora, optimizer=optimizer_of(recipe), run=run)
        yield to_adapters(recipe, "lora")[0], plan
    elif isinstance(plan.tuning, Lora) and isinstance(plan.tuning.base, Dense):
        yield "tuning: qlora", replace(plan, tuning=replace(plan.tuning, base=packed_base(recipe)))


def _fewer_tokens(plan: Plan) -> Iterator[tuple[str, Plan]]:
    batch = plan.batch
    if not adds_gradients_up(plan.tuning) and batch.micro_batch_size > 1:
        rows = batch.micro_batch_size // 2
        words = f"micro_batch_size: {rows} (a smaller global batch: another run)"
        yield words, replace(plan, batch=replace(batch, micro_batch_size=rows))
    if batch.seq_len > 1:
        length = batch.seq_len // 2
        words = f"seq_len: {length} (longer rows are cut or left out)"
        yield words, replace(plan, batch=replace(batch, seq_len=length))
