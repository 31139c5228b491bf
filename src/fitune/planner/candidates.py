"""What may be decided: families in order of quality, and what can be tried inside one of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fitune.planner.defaults import (
    CHUNK_TOKENS,
    GLOBAL_BATCH_SIZE,
    MOST_MICRO_BATCH,
    data_of,
    default_learning_rate,
    optimizer_of,
    run_of,
    schedule_of,
)
from fitune.planner.refusals import flash_refused_by_device, flash_refused_by_model
from fitune.spec.hardware import Gpu, Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.parameters import resolve_targets
from fitune.spec.plan import (
    Attention,
    Batch,
    ChunkedLoss,
    Full,
    Lora,
    Loss,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    Single,
    Tuning,
)
from fitune.spec.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What decides quality. Between families the better is taken, inside one the faster."""

    tuning: Tuning
    precision: Precision


def families(recipe: Recipe, *, model: ModelSpec, gpu: Gpu) -> tuple[Family, ...]:
    """All families the recipe and the device allow, the preferred first.

    Full before LoRA; fp32 masters before pure bf16, where updates smaller than 1/256 of a weight are rounded
    away. That loss is worse for full fine-tuning, whose steps are small, than training fewer parameters: full
    in pure bf16 comes last unless ``tuning: full`` is asked for.
    """
    tunings = _tunings(recipe, model)
    precisions = _precisions(recipe, gpu)
    found = [Family(tuning=t, precision=p) for t in tunings for p in precisions]
    last = [f for f in found if f.precision is Precision.BF16 and isinstance(f.tuning, Full)]
    if recipe.tuning is None and recipe.precision is None:
        found = [f for f in found if f not in last] + last
    return tuple(found)


def _tunings(recipe: Recipe, model: ModelSpec) -> tuple[Tuning, ...]:
    if recipe.tuning == "full":
        return (Full(),)
    lora = Lora(
        rank=recipe.lora_r,
        alpha=recipe.lora_alpha or 2 * recipe.lora_r,
        dropout=recipe.lora_dropout,
        targets=resolve_targets(model, recipe.lora_target_modules),
    )
    if recipe.tuning == "lora" or recipe.export in ("adapter", "merged"):
        return (lora,)
    return (Full(),) if recipe.export == "full" else (Full(), lora)


def _precisions(recipe: Recipe, gpu: Gpu) -> tuple[Precision, ...]:
    if recipe.precision is not None:
        return (Precision(recipe.precision),)
    if gpu.is_cpu:
        return (Precision.FP32,)
    return (Precision.BF16_MASTER, Precision.BF16) if gpu.has_bf16 else (Precision.FP16,)


def draft(recipe: Recipe, family: Family, *, model: ModelSpec, hardware: Hardware) -> Plan:
    """The plan of a family with the smallest batch and nothing recomputed: what the search varies."""
    optimizer = optimizer_of(recipe)
    rate = recipe.learning_rate or default_learning_rate(family.tuning, optimizer)
    return Plan(
        model=model,
        model_path=model.name,
        hardware=replace(hardware, gpus_per_node=1, nodes=1, internode_bandwidth=0.0),
        tuning=family.tuning,
        precision=family.precision,
        optimizer=optimizer,
        sharding=Single(),
        recompute=Recompute(blocks=0),
        attention=attention_of(recipe, model=model, gpu=hardware.gpu),
        loss=losses(recipe)[-1],
        batch=min(batches(recipe), key=lambda batch: batch.micro_batch_size),
        schedule=schedule_of(recipe, learning_rate=rate),
        data=data_of(recipe),
        run=run_of(recipe, model=model, tuning=family.tuning),
    )


def attention_of(recipe: Recipe, *, model: ModelSpec, gpu: Gpu) -> Attention:
    """The user's, else FlashAttention where device and model can, else torch's choice."""
    if recipe.attn_implementation is not None:
        return recipe.attn_implementation
    if model.model_type == "gemma2":
        return "eager"
    if flash_refused_by_device(gpu) or flash_refused_by_model(model, seq_len=recipe.seq_len):
        return "sdpa"
    return "flash"


def batches(recipe: Recipe) -> tuple[Batch, ...]:
    """Every split of the global batch into micro-batches that the pins allow, the largest first."""
    return tuple(
        Batch(
            micro_batch_size=micro,
            accumulation=steps,
            seq_len=recipe.seq_len,
            packing=recipe.packing,
        )
        for micro, steps in _splits(recipe)
    )


def _splits(recipe: Recipe) -> Iterator[tuple[int, int]]:
    micro, steps, whole = (
        recipe.micro_batch_size,
        recipe.gradient_accumulation_steps,
        recipe.global_batch_size,
    )
    if micro is not None and steps is not None:
        yield micro, steps
    elif micro is not None:
        yield micro, (whole or _nearest_multiple(GLOBAL_BATCH_SIZE, of=micro)) // micro
    elif steps is not None:
        yield (whole or _nearest_multiple(GLOBAL_BATCH_SIZE, of=steps)) // steps, steps
    else:
        whole = whole or GLOBAL_BATCH_SIZE
        for size in range(min(whole, MOST_MICRO_BATCH), 0, -1):
            if whole % size == 0:
                yield size, whole // size


def _nearest_multiple(target: int, *, of: int) -> int:
    return max(1, round(target / of)) * of


def losses(recipe: Recipe) -> tuple[Loss, ...]:
    """What the recipe allows, the one with the largest logits first."""
    if recipe.loss == "plain":
        return (PlainLoss(),)
    sizes = CHUNK_TOKENS if recipe.loss_chunk_tokens is None else (recipe.loss_chunk_tokens,)
    chunked = tuple(ChunkedLoss(chunk_tokens=size) for size in sizes)
    plain_allowed = recipe.loss is None and recipe.loss_chunk_tokens is None
    return (PlainLoss(), *chunked) if plain_allowed else chunked


def block_counts(recipe: Recipe, *, layers: int) -> range:
    """The numbers of recomputed blocks that may be tried: one, or 0…L."""
    asked = recipe.gradient_checkpointing
    if asked is None:
        return range(layers + 1)
    blocks = (layers if asked else 0) if isinstance(asked, bool) else asked
    return range(blocks, blocks + 1)
