"""What can be tried inside one method: splits of the batch, losses, numbers of recomputed blocks."""

from collections.abc import Iterator
from dataclasses import replace

from fitune.planner.defaults import (
    CHUNK_TOKENS,
    GLOBAL_BATCH_SIZE,
    MOST_MICRO_BATCH,
    data_of,
    default_learning_rate,
    run_of,
    schedule_of,
)
from fitune.planner.methods import Method
from fitune.planner.placements import Placement
from fitune.spec.hardware import Gpu, Hardware
from fitune.spec.kernels import flash_refused_by_device, flash_refused_by_model
from fitune.spec.model import ModelSpec
from fitune.spec.plan import (
    Attention,
    Batch,
    ChunkedLoss,
    Loss,
    PlainLoss,
    Plan,
    Recompute,
    Single,
)
from fitune.spec.recipe import Recipe
from fitune.spec.rules import adds_gradients_up


def draft(
    recipe: Recipe, method: Method, placement: Placement, *, model: ModelSpec, hardware: Hardware
) -> Plan:
    """The plan of a method with the smallest batch and nothing recomputed: what the search varies."""
    rate = recipe.learning_rate or default_learning_rate(method.tuning, method.optimizer)
    return Plan(
        model=model,
        model_path=model.name,
        hardware=devices_of(placement, hardware),
        tuning=method.tuning,
        precision=method.precision,
        optimizer=method.optimizer,
        sharding=placement.sharding,
        offload=placement.offload,
        recompute=Recompute(blocks=block_counts(recipe, layers=model.num_layers)[0]),
        attention=attention_of(recipe, model=model, gpu=hardware.gpu),
        kernels=recipe.kernels,
        compile_blocks=recipe.torch_compile,
        loss=losses(recipe)[-1],
        batch=Batch(micro_batch_size=1, accumulation=1, seq_len=recipe.seq_len, packing=recipe.packing),
        schedule=schedule_of(recipe, learning_rate=rate),
        data=data_of(recipe),
        run=run_of(recipe, model=model, tuning=method.tuning),
        added_tokens=tuple(recipe.added_tokens),
    )


def devices_of(placement: Placement, hardware: Hardware) -> Hardware:
    """One process has one device."""
    if isinstance(placement.sharding, Single):
        return replace(hardware, gpus_per_node=1, nodes=1, internode_bandwidth=0.0)
    return hardware


def attention_of(recipe: Recipe, *, model: ModelSpec, gpu: Gpu) -> Attention:
    """The user's, else FlashAttention where device and model can, else torch's choice."""
    if recipe.attn_implementation is not None:
        return recipe.attn_implementation
    if model.caps_scores:
        return "eager"
    if flash_refused_by_device(gpu) or flash_refused_by_model(model, gpu):
        return "sdpa"
    return "flash"


def batches(recipe: Recipe, method: Method, *, ranks: int) -> tuple[Batch, ...]:
    """Every split of the global batch over the ranks and into micro-batches that the pins allow, the largest first.

    Empty when there is none. Where gradients do not add up the micro-batch is the rank's whole share, unless the pins
    say otherwise.
    """
    whole = () if adds_gradients_up(method.tuning) else tuple(_whole_share(recipe, ranks))
    splits = whole or _splits(recipe, ranks)
    return tuple(
        Batch(micro_batch_size=micro, accumulation=steps, seq_len=recipe.seq_len, packing=recipe.packing)
        for micro, steps in splits
    )


def _whole_share(recipe: Recipe, ranks: int) -> Iterator[tuple[int, int]]:
    """All rows of a rank at once, if the pins leave that open."""
    if recipe.gradient_accumulation_steps not in (None, 1):
        return
    rows = rows_per_rank(recipe, ranks) if recipe.global_batch_size is not None else None
    if recipe.global_batch_size is None:
        rows = recipe.micro_batch_size or rows_per_rank(recipe, ranks)
    if rows is not None and recipe.micro_batch_size in (None, rows):
        yield rows, 1


def _splits(recipe: Recipe, ranks: int) -> Iterator[tuple[int, int]]:
    micro, steps = recipe.micro_batch_size, recipe.gradient_accumulation_steps
    if micro is not None and steps is not None:
        yield micro, steps
        return
    rows = rows_per_rank(recipe, ranks)
    if rows is None:
        return
    if micro is not None:
        yield from [(micro, rows // micro)] if rows % micro == 0 else []
    elif steps is not None:
        yield from [(rows // steps, steps)] if rows % steps == 0 else []
    else:
        for size in range(min(rows, MOST_MICRO_BATCH), 0, -1):
            if rows % size == 0:
                yield size, rows // size


def rows_per_rank(recipe: Recipe, ranks: int) -> int | None:
    """Rows of one rank in one optimizer step; None when the global batch cannot be divided evenly.

    Left open, the global batch is the multiple of ranks and pins that is nearest to the default.
    """
    if recipe.global_batch_size is not None:
        return None if recipe.global_batch_size % ranks else recipe.global_batch_size // ranks
    pinned = recipe.micro_batch_size or recipe.gradient_accumulation_steps or 1
    return max(1, round(GLOBAL_BATCH_SIZE / (ranks * pinned))) * pinned


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
