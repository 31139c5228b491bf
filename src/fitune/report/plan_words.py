"""A Plan in sentences, and as a list of all its settings."""

from collections.abc import Iterator
from typing import Any

from fitune.track.trackers import plan_settings
from fitune.units import counted, format_bytes
from fitune.values.plan import Epochs, Lora, PlainLoss, Plan, Precision, updates_in_backward
from fitune.values.serial import to_data
from fitune.values.words import (
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


def headline(plan: Plan) -> str:
    """``LoRA r16 on 7 linears · fp32 · AdamW · 1 × cpu``"""
    placed = describe_placement(plan)
    return " · ".join((*method_parts(plan), *([placed] if placed else []), describe_devices(plan.hardware)))


def sentences(plan: Plan, *, total: int | None) -> list[str]:
    """The plan as one would tell it; ``total`` is of its optimizer steps, None where the data is not known."""
    tuned, _, *optimizer = method_parts(plan)
    if isinstance(tuning := plan.tuning, Lora):
        tuned += f" ({', '.join(tuning.targets)}; alpha {tuning.alpha}, dropout {tuning.dropout:g})"
    placed = describe_placement(plan)
    return [
        f"Tuning: {tuned}.",
        f"Numbers are {_PRECISIONS[plan.precision]}.",
        _batch_sentence(plan),
        _recompute_sentence(plan),
        *_kernel_sentences(plan),
        "All logits of a micro-batch exist at once."
        if isinstance(plan.loss, PlainLoss)
        else f"The loss takes {plan.loss.chunk_tokens:,} tokens at a time, so the logits never exist whole.",
        *(f"Optimizer: {name}; weight decay {plan.optimizer.weight_decay:g}." for name in optimizer),
        *([f"Placement: {placed}."] if placed else []),
        *_schedule_sentences(plan, total),
    ]


def settings(plan: Plan) -> list[tuple[str, str]]:
    """Every setting with its dotted name, as plan.json has it, in words."""
    return [(name, _value(name, value)) for name, value in plan_settings(to_data(plan))]


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


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "not set"
