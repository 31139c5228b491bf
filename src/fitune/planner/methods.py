"""Methods: tuning, base, precision and optimizer, which decide quality, in the order in which they are preferred."""

from dataclasses import replace
from typing import Literal

from fitune.estimate.predict import predict_step_time
from fitune.planner.candidates import Method, Placement, Request, batches, draft
from fitune.planner.defaults import optimizer_of
from fitune.recipe.recipe import Recipe
from fitune.recipe.targets import resolve_adapted, resolve_modules_to_save
from fitune.units import format_seconds
from fitune.values.machines.hardware import Gpu
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import (
    ClipByNorm,
    ClipByValue,
    Dense,
    Full,
    InBackward,
    Lomo,
    Lora,
    Offload,
    Optimizer,
    Plan,
    Precision,
    Quantiser,
    Sgd,
    Single,
    Tuning,
)
from fitune.values.quantisers import quantiser_for

CHOICE = (
    "the first of full, LoRA and QLoRA that fits and has half the speed of the next; where none fits, full in pure "
    "bf16, AdaLomo, LOMO"
)
"""Which method is taken where the recipe leaves it open; printed then."""

BF16_IS_WORTH = 1.25
"""In fp32 nothing is rounded to 8 bits: on a processor bf16 has to be as many times as fast to be taken."""

LOMO_CLIP_VALUE = 1.0
"""Cutting to a value needs one backward, to a norm two (Lv et al. 2023, arXiv 2306.09782, section 3.3)."""


def methods_for(request: Request) -> tuple[Method, ...]:
    """All methods the recipe and the device allow, the preferred first; a processor's precision by its rates."""
    in_fp32 = methods(request)
    if not request.hardware.gpu.is_cpu or request.recipe.precision is not None:
        return in_fp32
    found = methods(request, on_cpu=(Precision.BF16_MASTER, Precision.FP32))
    first = next((method for method in found if method.precision is Precision.BF16_MASTER), None)
    if first is None:
        return in_fp32
    alone = Placement(sharding=Single(), offload=Offload())
    plan = draft(request, first, alone)
    largest = batches(request.recipe, first, ranks=1)[:1] or (plan.batch,)
    return in_fp32 if bf16_speedup(replace(plan, batch=largest[0])) < BF16_IS_WORTH else found


def methods(request: Request, *, on_cpu: tuple[Precision, ...] = (Precision.FP32,)) -> tuple[Method, ...]:
    """All methods the recipe and the device allow, the preferred first (CHOICE).

    ``on_cpu``: the precisions of a processor, the preferred first; ``methods_for`` knows them.

    In pure bf16 an update smaller than 1/256 of its weight is rounded away. That is worse for full fine-tuning,
    whose steps are small, than training fewer parameters: it comes last unless it is asked for.
    """
    recipe = request.recipe
    precisions = _precisions(recipe, request.hardware.gpu, on_cpu)
    found = [
        Method(tuning=tuning, precision=precision, optimizer=_optimizer(recipe, tuning))
        for tuning in _tunings(recipe, request.model)
        for precision in precisions
    ]
    if recipe.tuning is not None:
        return tuple(found)
    last = [
        method
        for method in found
        if isinstance(method.tuning, Lomo)
        or (
            recipe.precision is None
            and isinstance(method.tuning, Full)
            and method.precision is Precision.BF16
        )
    ]
    first = (method for method in found if method not in last)
    return (*first, *(replace(method, last_resort=True) for method in last))


def _tunings(recipe: Recipe, model: ModelSpec) -> tuple[Tuning, ...]:
    if recipe.tuning in ("lomo", "adalomo"):
        return (lomo_of(recipe, adaptive=recipe.tuning == "adalomo"),)
    is_open = recipe.tuning is None
    if recipe.tuning == "full" or (is_open and recipe.optimizer_in_backward):  # adapters gain nothing by it
        return (full_of(recipe),)
    loras = tuple(lora_of(recipe, model, base) for base in bases(recipe))
    if not is_open or recipe.adapters_asked_by:
        return loras
    updating: tuple[Tuning, ...] = ()
    if "optimizer" not in recipe.model_fields_set or recipe.optimizer == "sgd":
        updating = tuple(lomo_of(recipe, adaptive=adaptive) for adaptive in (True, False))
    if recipe.max_grad_value is not None:  # nothing else clips by value
        return updating
    return (Full(), *updating) if recipe.export == "full" else (Full(), *loras, *updating)


def full_of(recipe: Recipe) -> Full:
    """Full fine-tuning; in backward it clips by the norm too, unless by value is asked for."""
    if not recipe.optimizer_in_backward:
        return Full()
    value = recipe.max_grad_value
    clip = ClipByNorm(max_norm=recipe.max_grad_norm) if value is None else ClipByValue(value=value)
    return Full(update=InBackward(clip=clip))


def to_adapters(recipe: Recipe, tuning: Literal["lora", "qlora"]) -> tuple[str, dict[str, object]]:
    """Words and settings of a change to adapters, without what only training every weight allows."""
    settings: dict[str, object] = {"optimizer_in_backward": False, "max_grad_value": None}
    left_out = [name for name in settings if getattr(recipe, name) not in (None, False)]
    left_out += ["export: full"] if recipe.export == "full" else []
    words = f"tuning: {tuning}" + (f" without {' and '.join(left_out)}" if left_out else "")
    return words, {"tuning": tuning, "export": None, **settings}


def lora_of(recipe: Recipe, model: ModelSpec, base: Dense | Quantiser) -> Lora:
    """The adapters that the recipe asks for, on ``base`` weights, with targets resolved to the model's linears."""
    # rows of new tokens have to be trained, in both tables
    whole = ["embed_tokens", "lm_head"] if recipe.added_tokens else recipe.lora_modules_to_save
    targets, layers = resolve_adapted(model, targets=recipe.lora_target_modules, layers=recipe.lora_layers)
    return Lora(
        rank=recipe.lora_r,
        alpha=recipe.lora_alpha or 2 * recipe.lora_r,
        dropout=recipe.lora_dropout,
        targets=targets,
        base=base,
        dora=recipe.dora,
        rslora=recipe.rslora,
        layers=layers,
        modules_to_save=resolve_modules_to_save(model, whole),
    )


def bases(recipe: Recipe) -> tuple[Dense | Quantiser, ...]:
    """Frozen bases that the recipe allows: 16 bit before few bits."""
    if not recipe.quantization_is_asked_for:
        dense = () if recipe.tuning == "qlora" else (Dense(),)
        packed = () if recipe.tuning == "lora" or recipe.quantization == "none" else (packed_base(recipe),)
        return (*dense, *packed)
    return (packed_base(recipe),)


def packed_base(recipe: Recipe) -> Quantiser:
    """The quantiser that is asked for, or the default one, with the recipe's settings."""
    word = None if recipe.quantization == "none" else recipe.quantization
    bits, double = recipe.quantization_bits, recipe.double_quantization
    return quantiser_for(word, bits=bits, group_size=recipe.quantization_group_size, double=double)


def lomo_of(recipe: Recipe, *, adaptive: bool) -> Lomo:
    """Clipped as asked for; by value when nothing is, because that costs one backward and not two."""
    if recipe.max_grad_value is not None:
        return Lomo(adaptive=adaptive, clip=ClipByValue(value=recipe.max_grad_value))
    if "max_grad_norm" in recipe.model_fields_set:
        return Lomo(adaptive=adaptive, clip=ClipByNorm(max_norm=recipe.max_grad_norm))
    return Lomo(adaptive=adaptive, clip=ClipByValue(value=LOMO_CLIP_VALUE))


def _optimizer(recipe: Recipe, tuning: Tuning) -> Optimizer:
    """LOMO is one itself; another that was asked for beside it is for the rules to refuse."""
    if isinstance(tuning, Lomo) and not (recipe.tuning and "optimizer" in recipe.model_fields_set):
        return Sgd(weight_decay=recipe.weight_decay)
    return optimizer_of(recipe)


def _precisions(recipe: Recipe, gpu: Gpu, on_cpu: tuple[Precision, ...]) -> tuple[Precision, ...]:
    if recipe.precision is not None:
        return (Precision(recipe.precision),)
    if gpu.is_cpu:
        return on_cpu
    return (Precision.BF16_MASTER, Precision.BF16) if gpu.has_bf16 else (Precision.FP16,)


def bf16_speedup(plan: Plan) -> float:
    """Seconds of the plan's step in fp32 / those with bf16 products and fp32 masters: all of it, not products alone."""
    return _seconds(plan, Precision.FP32) / _seconds(plan, Precision.BF16_MASTER)


def why_on_cpu(plan: Plan) -> str:
    """The reason for the precision that was taken on a processor, with its arithmetic."""
    gpu, speedup = plan.hardware.gpu, bf16_speedup(plan)
    fp32, bf16 = (format_seconds(_seconds(plan, each)) for each in (Precision.FP32, Precision.BF16_MASTER))
    why = (
        f"{plan.precision.value}: a step takes {fp32} in fp32 and {bf16} in bf16-master, bf16 compute with fp32 "
        f"masters ({plan.hardware.rates}), {speedup:.1f} × as fast; bf16-master rounds more, and is taken from "
        f"{BF16_IS_WORTH:g} × on"
    )
    if plan.precision is Precision.FP32 and speedup >= BF16_IS_WORTH:
        return f"{why}, but no plan with it fits"
    if plan.hardware.calibration is None and gpu.bf16_flops < gpu.fp32_flops:
        return f"{why}; {gpu.name} names no bf16 instructions: fitune doctor --calibrate measures both"
    return why


def _seconds(plan: Plan, precision: Precision) -> float:
    return predict_step_time(replace(plan, precision=precision)).step_seconds
