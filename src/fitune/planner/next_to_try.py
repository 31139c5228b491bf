"""When no smaller micro-batch helps: what the user may change, with what is predicted for it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fitune.errors import Shortage
from fitune.estimate.memory import memory_of
from fitune.planner.defaults import CHUNK_TOKENS, optimizer_of
from fitune.planner.methods import lora_of, nf4_of, to_adapters
from fitune.planner.retry import Known, described
from fitune.spec.plan import (
    ChunkedLoss,
    ClipByNorm,
    Dense,
    Full,
    InBackward,
    Lora,
    Plan,
    Recompute,
    Single,
    trains_every_weight,
)
from fitune.spec.recipe import Recipe
from fitune.spec.rules import adds_gradients_up, keeps_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings, and the peak of tensors predicted with them."""

    words: str
    peak_bytes: int


def next_to_try(failed: Plan, recipe: Recipe, shortage: Shortage) -> tuple[Change, ...]:
    """What takes less at the peak and where memory ran out, and can be trained: what costs time before what costs
    quality. These are the user's to decide."""
    known = Known.of(failed, shortage)
    found = []
    for words, plan in _changes(failed, recipe):
        if keeps_rules(plan, "plan", "train"):
            memory = memory_of(described(plan))
            if known.is_less(memory):
                found.append(Change(words=words, peak_bytes=memory.tensor_peak_bytes))
    return tuple(found)


def _changes(failed: Plan, recipe: Recipe) -> Iterator[tuple[str, Plan]]:
    """The same arithmetic in less room, each on top of the one before; then, on top of all of them, one other thing."""
    words, plan = "", failed
    for more, plan in _frugal(failed):
        words = f"{words}, {more}" if words else more
        yield words, plan
    for more, other in (
        *_in_backward(plan),
        *_offloaded(plan),
        *_other_method(plan, recipe),
        *_fewer_tokens(plan),
    ):
        yield (f"{words}, {more}" if words else more), other


def _frugal(plan: Plan) -> Iterator[tuple[str, Plan]]:
    smallest = min(CHUNK_TOKENS)
    if not isinstance(plan.loss, ChunkedLoss) or plan.loss.chunk_tokens > smallest:
        plan = replace(plan, loss=ChunkedLoss(chunk_tokens=smallest))
        yield f"loss: chunked, loss_chunk_tokens: {smallest}", plan
    if plan.recompute.blocks < plan.model.num_layers:
        plan = replace(plan, recompute=Recompute(blocks=plan.model.num_layers))
        yield "gradient_checkpointing: true", plan


def _in_backward(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The same steps, clipped alike, without their gradients."""
    gathers = plan.tuning == Full() and plan.offload.optimizer == "device"
    if gathers and isinstance(plan.sharding, Single) and plan.batch.accumulation == 1:
        clip = ClipByNorm(max_norm=plan.schedule.max_grad_norm)
        yield "optimizer_in_backward: true", replace(plan, tuning=Full(update=InBackward(clip=clip)))


def _offloaded(plan: Plan) -> Iterator[tuple[str, Plan]]:
    if plan.hardware.gpu.is_cpu:
        return
    offload = plan.offload
    if offload.activations == "device":
        yield "offload_activations: cpu", replace(plan, offload=replace(offload, activations="cpu"))
    if offload.optimizer == "device":
        offload = replace(offload, optimizer="cpu")
        yield "offload_optimizer: cpu", replace(plan, offload=offload)
    if offload.parameters == "device":
        both = replace(offload, parameters="cpu")
        yield "offload_parameters: cpu, offload_optimizer: cpu", replace(plan, offload=both)


def _other_method(plan: Plan, recipe: Recipe) -> Iterator[tuple[str, Plan]]:
    """An adapter in place of all weights, four bits in place of sixteen."""
    if trains_every_weight(plan.tuning):
        lora = lora_of(recipe, plan.model, Dense())
        run = replace(plan.run, export="adapter")
        plan = replace(plan, tuning=lora, optimizer=optimizer_of(recipe), run=run)
        yield to_adapters(recipe, "lora")[0], plan
    elif isinstance(plan.tuning, Lora) and isinstance(plan.tuning.base, Dense):
        yield "tuning: qlora", replace(plan, tuning=replace(plan.tuning, base=nf4_of(recipe)))


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
