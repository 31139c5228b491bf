"""A Plan in sentences, and as a list of all its settings."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from fitune.units import as_ranges, counted, format_bytes
from fitune.values.machines.hardware import Gpu, Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    Batch,
    ClipByNorm,
    ClipByValue,
    DataPlan,
    DataSource,
    Ddp,
    Dense,
    Epochs,
    Full,
    InBackward,
    Lomo,
    Lora,
    Offload,
    Optimizer,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Sgd,
    Tuning,
    Zero,
    updates_in_backward,
)
from fitune.values.words import (
    backend_name,
    describe_devices,
    describe_placement,
    describe_schedule,
    method_parts,
)

_PRECISIONS = {
    Precision.FP32: "32-bit floats",
    Precision.BF16: "bf16 throughout",
    Precision.BF16_MASTER: "bf16, with fp32 copies of the trained weights for the optimizer",
    Precision.FP16: "fp16 with loss scaling, with fp32 copies of the trained weights for the optimizer",
}

_PLACES = {"cpu": "in host memory", "nvme": "on NVMe"}

_CONTAINERS = (
    Plan,
    ModelSpec,
    Hardware,
    Gpu,
    Offload,
    Recompute,
    Batch,
    Schedule,
    DataPlan,
    DataSource,
    RunPlan,
)
"""Types that are always the same in their place, so that naming them says nothing."""


def headline(plan: Plan) -> str:
    """``LoRA r16 on 7 linears · fp32 · AdamW · 1 × cpu``"""
    placed = describe_placement(plan)
    return " · ".join((*method_parts(plan), *([placed] if placed else []), describe_devices(plan.hardware)))


def sentences(plan: Plan, *, total: int | None) -> list[str]:
    """The plan as one would tell it; ``total`` is of its optimizer steps, None where the data is not known."""
    return [
        _tuning_sentence(plan.tuning),
        f"Numbers are {_PRECISIONS[plan.precision]}.",
        _batch_sentence(plan),
        _recompute_sentence(plan),
        *_kernel_sentences(plan),
        "All logits of a micro-batch exist at once."
        if isinstance(plan.loss, PlainLoss)
        else f"The loss takes {plan.loss.chunk_tokens:,} tokens at a time, so the logits never exist whole.",
        *([] if isinstance(plan.tuning, Lomo) else [_optimizer_sentence(plan.optimizer)]),
        *_placement_sentences(plan),
        *_schedule_sentences(plan, total),
    ]


def settings(plan: Plan) -> list[tuple[str, str]]:
    """Every setting with its dotted name, but for the matrices of the model: they follow from its shapes."""
    return [(name, _value(name, value)) for name, value in _leaves("", plan) if name != "model.linears"]


def _tuning_sentence(tuning: Tuning) -> str:
    match tuning:
        case Full(update=InBackward(clip=clip)):
            return f"Every parameter is trained, each stepped as soon as its gradient exists; {_clip_words(clip)}."
        case Full():
            return "Every parameter is trained."
        case Lomo(clip=clip):
            name = "AdaLomo" if tuning.adaptive else "LOMO"
            return f"Every parameter is trained, each as soon as its gradient exists ({name}); {_clip_words(clip)}."
        case Lora():
            norms = " with the norms of the adapted weights (DoRA)" if tuning.dora else ""
            blocks = f" of blocks {as_ranges(tuning.layers)}" if tuning.layers else ""
            scale = "over the rank's root, " if tuning.rslora else ""
            whole = {"embed_tokens": "the embedding", "lm_head": "the head"}
            tables = " and ".join(whole[name] for name in tuning.modules_to_save)
            tables = f", {tables} whole" if tables else ""
            base = "" if isinstance(tuning.base, Dense) else f" in {tuning.base}"
            return (
                f"Adapters of rank {tuning.rank} (alpha {tuning.alpha}, {scale}dropout {tuning.dropout:g}) are "
                f"trained on {', '.join(tuning.targets)}{blocks}{norms}{tables}; "
                f"the base stays frozen{base}."
            )


def _clip_words(clip: ClipByNorm | ClipByValue) -> str:
    match clip:
        case ClipByValue(value=value):
            return f"gradients are cut to ±{value:g}"
        case ClipByNorm(max_norm=0):
            return "gradients are not clipped"
        case ClipByNorm(max_norm=max_norm):
            return f"a first pass measures the gradient's norm, which is kept to {max_norm:g}"


def _batch_sentence(plan: Plan) -> str:
    batch, devices = plan.batch, plan.hardware.num_gpus
    what = "packs of rows" if batch.packing else "rows"
    product = f"{batch.micro_batch_size} × {batch.seq_len:,} × {batch.accumulation}"
    product += f" × {devices}" if devices > 1 else ""
    return (
        f"One optimizer step sees at most {product} = {plan.tokens_per_step:,} tokens: micro-batches of "
        f"{batch.micro_batch_size} {what} of up to {batch.seq_len:,} tokens, {batch.accumulation} for each "
        f"step{f', on {devices} devices' if devices > 1 else ''}."
    )


def _recompute_sentence(plan: Plan) -> str:
    blocks, layers = plan.recompute.blocks, plan.model.num_layers
    if blocks == 0:
        return "All activations are kept; nothing is computed twice."
    which = f"All {layers} blocks keep" if blocks == layers else f"The first {blocks} of {layers} blocks keep"
    return f"{which} only their input and run again in backward."


def _kernel_sentences(plan: Plan) -> Iterator[str]:
    if plan.kernels == "liger":
        yield "Norms, gated MLPs and rotary positions are Liger's fused kernels; the loss is one kernel."
    if plan.compile_blocks:
        yield "Each block is compiled by torch; what was predicted is for uncompiled blocks."
    if plan.tf32:
        yield "Products of fp32 numbers are TF32: 10 bits of each mantissa instead of 23."


def _optimizer_sentence(optimizer: Optimizer) -> str:
    match optimizer:
        case Sgd():
            words = f"SGD (momentum {optimizer.momentum:g}"
        case AdamW() | AdamW8bit():
            bits = " in 8 bit" if isinstance(optimizer, AdamW8bit) else ""
            words = f"AdamW{bits} (β {optimizer.beta1:g}, {optimizer.beta2:g}"
    return f"The optimizer is {words}; weight decay {optimizer.weight_decay:g})."


def _placement_sentences(plan: Plan) -> Iterator[str]:
    match plan.sharding:
        case Ddp():
            yield "Every device holds the whole model; gradients are averaged over all of them (DDP)."
        case Zero(stage=stage, backend=backend, hybrid=hybrid):
            shared = {1: "optimizer states", 2: "optimizer states and gradients", 3: "all states and weights"}
            where = "the devices of a node" if hybrid else "all devices"
            yield f"ZeRO-{stage} by {backend_name(backend)}: {shared[stage]} are divided among {where}."
    offload = plan.offload
    places = {
        "weights": offload.parameters,
        "optimizer states": offload.optimizer,
        "activations": offload.activations,
    }
    away = [f"{what} {_PLACES[place]}" for what, place in places.items() if place != "device"]
    if away:
        yield f"Kept off the device until needed: {', '.join(away)}."


def _schedule_sentences(plan: Plan, total: int | None) -> Iterator[str]:
    schedule = plan.schedule
    if total is not None:
        epochs = (
            f" (num_epochs: {schedule.duration.count:g})" if isinstance(schedule.duration, Epochs) else ""
        )
        yield f"Over {counted(total, 'step')}{epochs} the learning rate {describe_schedule(schedule, total=total)}."
    if not updates_in_backward(plan.tuning):
        norm = schedule.max_grad_norm
        yield f"Gradients are clipped at norm {norm:g}." if norm else "Gradients are not clipped."


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Settings that hold no others; a choice also gives its own name (``tuning`` is ``Lora``)."""
    if dataclasses.is_dataclass(value):
        if not isinstance(value, _CONTAINERS):
            yield name, type(value).__name__
        for field in dataclasses.fields(value):
            yield from _leaves(f"{name}.{field.name}".removeprefix("."), getattr(value, field.name))
    elif isinstance(value, tuple) and any(isinstance(item, DataSource) for item in value):
        for place, item in enumerate(value, start=1):
            yield from _leaves(f"{name}.{place}", item)
    else:
        yield name, value


def _value(name: str, value: Any) -> str:
    if name == "tuning.layers":
        return as_ranges(value) or "all"
    if isinstance(value, tuple):
        return ", ".join(str(item) for item in value) or "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "not set"
