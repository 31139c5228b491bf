"""Pins that contradict each other or the hardware, refused with the arithmetic before anything is searched."""

from fitune.errors import HardwareError, RecipeError
from fitune.planner.refusals_of_methods import refuse_methods
from fitune.planner.refusals_of_spreads import refuse_spreads
from fitune.spec.hardware import Gpu, Hardware
from fitune.spec.kernels import liger_refused_by_device, liger_refused_by_model
from fitune.spec.model import ModelSpec
from fitune.spec.recipe import Recipe


def refuse_contradictions(recipe: Recipe, *, model: ModelSpec, hardware: Hardware) -> None:
    """Raises RecipeError or HardwareError for the first thing that cannot be honoured."""
    _refuse_long_rows(recipe, model)
    _refuse_unequal_batch(recipe)
    _refuse_blocks(recipe, model)
    _refuse_loss(recipe)
    refuse_methods(recipe, model, hardware.gpu)
    refuse_spreads(recipe, hardware)
    _refuse_export(recipe)
    _refuse_evaluation_of_nothing(recipe)
    _refuse_precision(recipe, hardware.gpu)
    _refuse_attention(recipe, model, hardware.gpu)
    _refuse_kernels(recipe, model, hardware.gpu)
    _refuse_compile(recipe)


def _refuse_long_rows(recipe: Recipe, model: ModelSpec) -> None:
    if recipe.seq_len > model.max_seq_len:
        raise RecipeError(
            f"seq_len = {recipe.seq_len} is {recipe.seq_len - model.max_seq_len} more than the "
            f"{model.max_seq_len} positions that {model.name} was made for",
            hint=f"seq_len: {model.max_seq_len}",
        )


def _refuse_unequal_batch(recipe: Recipe) -> None:
    micro, steps, whole = (
        recipe.micro_batch_size,
        recipe.gradient_accumulation_steps,
        recipe.global_batch_size,
    )
    if whole is None:
        return
    if micro is not None and steps is not None and micro * steps != whole:
        raise RecipeError(
            f"micro_batch_size {micro} × gradient_accumulation_steps {steps} = {micro * steps}, "
            f"not global_batch_size {whole}",
            hint=f"leave one of them open, or global_batch_size: {micro * steps}",
        )
    for name, value in (("micro_batch_size", micro), ("gradient_accumulation_steps", steps)):
        if value is not None and whole % value:
            raise RecipeError(
                f"global_batch_size {whole} is no multiple of {name} {value}: {whole} / {value} = {whole / value:.2f}",
                hint=f"global_batch_size: {-(-whole // value) * value}",
            )


def _refuse_blocks(recipe: Recipe, model: ModelSpec) -> None:
    blocks = recipe.gradient_checkpointing
    if not isinstance(blocks, bool) and blocks is not None and blocks > model.num_layers:
        raise RecipeError(
            f"gradient_checkpointing = {blocks} blocks, and {model.name} has {model.num_layers}",
            hint=f"gradient_checkpointing: {model.num_layers}, or true",
        )


def _refuse_loss(recipe: Recipe) -> None:
    if recipe.loss == "plain" and recipe.loss_chunk_tokens is not None:
        raise RecipeError(
            f"loss: plain makes all logits at once, and loss_chunk_tokens = {recipe.loss_chunk_tokens} asks for chunks",
            hint="loss: chunked",
        )


def _refuse_export(recipe: Recipe) -> None:
    if recipe.tuning in ("full", "lomo", "adalomo") and recipe.export in ("adapter", "merged"):
        raise RecipeError(
            f"export: {recipe.export} needs an adapter, and tuning: {recipe.tuning} trains none",
            hint="export: full",
        )
    adapters = recipe.tuning in ("lora", "qlora") or recipe.dora or recipe.rslora
    if (adapters or recipe.quantization_is_asked_for) and recipe.export == "full":
        raise RecipeError("export: full is for tuning: full; LoRA trains an adapter", hint="export: merged")


def _refuse_evaluation_of_nothing(recipe: Recipe) -> None:
    if recipe.val_fraction and recipe.eval_data:
        raise RecipeError(
            f"val_fraction = {recipe.val_fraction:g} holds rows out, and eval_data names rows to evaluate on",
            hint="keep one of them",
        )
    if recipe.eval_steps and recipe.data and not recipe.eval_data and not recipe.val_fraction:
        raise RecipeError(
            f"eval_steps = {recipe.eval_steps}, and there is nothing to evaluate on",
            hint="val_fraction: 0.05 holds rows out, eval_data names a file of them",
        )


def _refuse_precision(recipe: Recipe, gpu: Gpu) -> None:
    if recipe.precision in ("bf16", "bf16-master") and not gpu.has_bf16:
        raise HardwareError(
            f"precision = {recipe.precision}, and {gpu.name} (compute capability {_capability(gpu)}) has no bf16 "
            "matrix units; they came with 8.0",
            hint="precision: fp16, which keeps fp32 masters and scales the loss",
        )
    if recipe.precision == "fp16" and gpu.is_cpu:
        raise HardwareError(
            "precision = fp16 is for GPUs; torch trains on a CPU in fp32 or bf16", hint="precision: fp32"
        )


def _refuse_attention(recipe: Recipe, model: ModelSpec, gpu: Gpu) -> None:
    if recipe.attn_implementation == "flash":
        why_not_here = flash_refused_by_device(gpu)
        if why_not_here is not None:
            raise HardwareError(
                f"attn_implementation = flash: {why_not_here}", hint="attn_implementation: sdpa"
            )
        why_not = flash_refused_by_model(model)
        if why_not is not None:
            raise RecipeError(f"attn_implementation = flash: {why_not}", hint="attn_implementation: sdpa")


def _refuse_kernels(recipe: Recipe, model: ModelSpec, gpu: Gpu) -> None:
    if recipe.kernels == "torch":
        return
    why_not_here = liger_refused_by_device(gpu)
    if why_not_here is not None:
        raise HardwareError(f"kernels: liger: {why_not_here}", hint="kernels: torch")
    why_not = liger_refused_by_model(model)
    if why_not is not None:
        raise RecipeError(f"kernels: liger: {why_not}", hint="kernels: torch")


def _refuse_compile(recipe: Recipe) -> None:
    if not recipe.torch_compile:
        return
    if recipe.kernels == "liger":
        raise RecipeError(
            "kernels: liger write gradients over what they kept, which torch_compile does not expect",
            hint="one of them: kernels: torch, or no torch_compile",
        )
    if recipe.tuning in ("lomo", "adalomo") or recipe.optimizer_in_backward:
        who = "optimizer_in_backward" if recipe.optimizer_in_backward else f"tuning: {recipe.tuning}"
        raise RecipeError(
            f"{who} uses each gradient as soon as it exists, and a block under torch_compile has all "
            "of its gradients at once",
            hint="no torch_compile",
        )
    places = ("offload_parameters", "offload_optimizer", "offload_activations")
    away = next((place for place in places if getattr(recipe, place) in ("cpu", "nvme")), None)
    if away is not None:
        raise RecipeError(
            f"torch_compile expects tensors where they were, and {away} = {getattr(recipe, away)} moves them away",
            hint=f"no torch_compile, or no {away}",
        )


def flash_refused_by_device(gpu: Gpu) -> str | None:
    if gpu.is_cpu:
        return "FlashAttention runs on GPUs"
    if not gpu.has_flash_attention:
        return f"FlashAttention-2 needs compute capability 8.0 or newer (Ampere), and {gpu.name} has {_capability(gpu)}"
    return None


def flash_refused_by_model(model: ModelSpec) -> str | None:
    """Why the FlashAttention kernel cannot compute this model's attention, or None."""
    if model.model_type == "falcon":
        return "Falcon's attention takes a mask over the whole stream, which the kernel does not"
    if model.caps_scores:
        return f"{model.name} caps its attention scores, which no fused kernel does"
    if model.head_dim > 256:
        return f"heads of {model.head_dim} are larger than the 256 the kernel takes"
    if model.head_dim % 8:
        return f"heads of {model.head_dim} are no multiple of the 8 the kernel takes"
    return None


def _capability(gpu: Gpu) -> str:
    return f"{gpu.capability[0]}.{gpu.capability[1]}"
