"""One line for each thing the user left open: what was taken, why, and the arithmetic."""

from collections.abc import Iterator

from fitune.planner.describe import describe_loss
from fitune.planner.refusals import flash_refused_by_device, flash_refused_by_model
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import ChunkedLoss, Full, Lora, PlainLoss, Plan, Precision
from fitune.spec.recipe import Recipe
from fitune.units import format_bytes


def decisions_of(recipe: Recipe, plan: Plan, *, model: ModelSpec, hardware: Hardware) -> tuple[str, ...]:
    lines: list[Iterator[str]] = [
        _devices(hardware),
        _tuning(recipe, plan),
        _precision(recipe, plan),
        _batch(recipe, plan),
        _recompute(recipe, plan),
        _loss(recipe, plan),
        _attention(recipe, plan),
        _learning_rate(recipe, plan),
        _unused(recipe),
        _lora(recipe, plan),
        _output(recipe, plan),
    ]
    return tuple(line for group in lines for line in group)


def _devices(hardware: Hardware) -> Iterator[str]:
    if hardware.num_gpus > 1:
        yield (
            f"devices: 1 of the {hardware.num_gpus} {hardware.gpu.name}; this version trains in one process, "
            "sharding over devices is not in it"
        )


def _tuning(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.tuning is not None:
        return
    order = "full with fp32 masters before LoRA, full in pure bf16 last"
    if isinstance(plan.tuning, Full):
        yield f"tuning: full, every weight is trained; it fits (order: {order})"
    else:
        yield f"tuning: lora, because no better family fits (order: {order})"


def _precision(recipe: Recipe, plan: Plan) -> Iterator[str]:
    why = {
        Precision.FP32: f"fp32, because {plan.hardware.gpu.name} is slow in 16 bit",
        Precision.FP16: f"fp16 with fp32 masters and a loss scale, because {plan.hardware.gpu.name} has no bf16",
        Precision.BF16_MASTER: "bf16-master, bf16 compute with fp32 masters: nothing is rounded away",
        Precision.BF16: "bf16 without fp32 masters, because they do not fit",
    }
    if recipe.precision is None:
        yield f"precision: {why[plan.precision]}"
    if plan.precision is Precision.BF16:
        yield (
            "note on bf16: with 8 significant bits an update smaller than about 1/256 of its weight is lost; "
            "bf16-master keeps it"
        )


def _batch(recipe: Recipe, plan: Plan) -> Iterator[str]:
    batch = plan.batch
    if recipe.micro_batch_size is not None and recipe.gradient_accumulation_steps is not None:
        return
    whole = "asked for" if recipe.global_batch_size is not None else "fitune's default, near 16"
    unit = "packs" if batch.packing else "rows"
    yield (
        f"batch: {batch.micro_batch_size} × {batch.accumulation} accumulated = {batch.global_batch_size} {unit} "
        f"({whole}) of at most {batch.seq_len} tokens; "
        f"the fastest split that fits (within 1 %, the one {'that needs least memory' if batch.packing else _BUSY})"
    )


_BUSY = "with most rows at once: unpacked rows are short"


def _recompute(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.gradient_checkpointing is not None:
        return
    blocks, layers = plan.recompute.blocks, plan.model.num_layers
    if blocks == 0:
        yield "recompute: no block, all activations fit"
    else:
        again = f"{blocks / layers:.0%} of a forward pass more"
        yield f"recompute: {blocks} of {layers} blocks, the fewest that fit with this batch and loss; costs {again}"


def _loss(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.loss is not None and (recipe.loss == "plain" or recipe.loss_chunk_tokens is not None):
        return
    logits = plan.model.vocab_size * (4 if plan.precision is Precision.FP32 else 8)
    tokens = plan.batch.micro_batch_tokens
    match plan.loss:
        case PlainLoss():
            yield f"loss: plain, all logits at once take {format_bytes(tokens * logits)}"
        case ChunkedLoss(chunk_tokens=size):
            yield (
                f"loss: {describe_loss(plan.loss)}, logits take {format_bytes(min(size, tokens) * logits)} "
                f"instead of {format_bytes(tokens * logits)}"
            )


def _attention(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.attn_implementation is not None:
        return
    why = flash_refused_by_device(plan.hardware.gpu) or flash_refused_by_model(
        plan.model, seq_len=plan.batch.seq_len
    )
    yield f"attention: {plan.attention}" + (
        f", because {why}" if why else ", the fastest that keeps no scores"
    )


def _learning_rate(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.learning_rate is None:
        yield f"learning rate: {plan.schedule.learning_rate:g}, fitune's default for this tuning and optimizer"


def _unused(recipe: Recipe) -> Iterator[str]:
    """Settings that were given and that another one overrules."""
    for ruling, unused in (("max_steps", "num_epochs"), ("warmup_steps", "warmup_ratio")):
        if getattr(recipe, ruling) is not None and unused in recipe.model_fields_set:
            yield f"note on {unused}: {ruling} {getattr(recipe, ruling)} is set too, and it is the one that counts"


def _lora(recipe: Recipe, plan: Plan) -> Iterator[str]:
    match plan.tuning:
        case Lora(rank=rank, alpha=alpha, targets=targets):
            if recipe.lora_alpha is None:
                yield f"lora_alpha: {alpha} = 2 · lora_r {rank}"
            narrowest = max(min(m.in_features, m.out_features) for m in plan.model.linears if m.adaptable)
            if rank > narrowest:
                yield (
                    f"note on lora_r: no linear has more than {narrowest} dimensions on its narrow side; a rank "
                    f"of {rank} costs memory and can say no more than {narrowest}"
                )
            if recipe.lora_target_modules == ["all-linear"]:
                yield f"LoRA targets: all linears of a block: {', '.join(targets)}"


def _output(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.output_dir is None:
        yield f"output: {plan.run.output_dir}"
