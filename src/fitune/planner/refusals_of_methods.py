"""Pins on the method that contradict each other, refused with what would do instead."""

from fitune.errors import HardwareError, RecipeError
from fitune.spec.hardware import Gpu
from fitune.spec.model import ModelSpec
from fitune.spec.recipe import Recipe

_LOMO = ("lomo", "adalomo")


def refuse_methods(recipe: Recipe, model: ModelSpec, gpu: Gpu) -> None:
    """Raises RecipeError or HardwareError for the first that cannot be honoured."""
    _refuse_lomo(recipe)
    _refuse_in_backward(recipe)
    _refuse_adding_up(recipe)
    _refuse_offload_of_nothing(recipe)
    _refuse_quantization(recipe)
    _refuse_groups(recipe, model)
    _refuse_momentum(recipe)
    _refuse_optimizer(recipe, gpu)
    _refuse_clipping(recipe)


def _refuse_lomo(recipe: Recipe) -> None:
    if recipe.tuning not in _LOMO:
        return
    name = recipe.tuning
    if recipe.precision == "bf16-master":
        raise RecipeError(
            f"tuning: {name} updates the weights themselves and keeps no fp32 masters", hint="precision: bf16"
        )
    if "optimizer" in recipe.model_fields_set and recipe.optimizer != "sgd":
        raise RecipeError(
            f"tuning: {name} is an optimizer itself, and optimizer: {recipe.optimizer} asks for another",
            hint=f"leave optimizer out, or tuning: full with optimizer: {recipe.optimizer}",
        )
    if (
        recipe.max_grad_norm == 0
        and "max_grad_norm" in recipe.model_fields_set
        and recipe.max_grad_value is None
    ):
        raise RecipeError(
            f"tuning: {name} needs gradients clipped, and max_grad_norm = 0 turns that off",
            hint="max_grad_value: 1.0, which costs no second backward, or max_grad_norm: 1.0",
        )


def _refuse_in_backward(recipe: Recipe) -> None:
    narrowing = recipe.quantization_is_asked_for or recipe.dora or recipe.rslora
    adapters = recipe.tuning in ("lora", "qlora") or narrowing or recipe.export in ("adapter", "merged")
    if recipe.optimizer_in_backward and adapters:
        raise RecipeError(
            "optimizer_in_backward spares the gradients of all weights, and adapters are hundreds of times fewer: "
            "there is next to nothing to gain",
            hint="leave optimizer_in_backward out, or tuning: full",
        )


def _refuse_adding_up(recipe: Recipe) -> None:
    """Accumulation, asked for or implied, where gradients are used in backward."""
    lomo = recipe.tuning in _LOMO
    if not lomo and not recipe.optimizer_in_backward:
        return
    who = f"tuning: {recipe.tuning}" if lomo else "optimizer_in_backward"
    other = "tuning: full" if lomo else "no optimizer_in_backward"
    steps = recipe.gradient_accumulation_steps
    if steps is not None and steps > 1:
        raise RecipeError(
            f"{who} uses every gradient as soon as it exists, so nothing can be added up over "
            f"gradient_accumulation_steps = {steps} micro-batches",
            hint=f"gradient_accumulation_steps: 1 with a larger micro_batch_size, or {other}",
        )
    micro, whole, devices = recipe.micro_batch_size, recipe.global_batch_size, recipe.gpus * recipe.nodes
    if micro is not None and whole is not None and micro * devices < whole:
        raise RecipeError(
            f"{who} takes one micro-batch a step, and global_batch_size {whole} is "
            f"{whole / (micro * devices):g} × micro_batch_size {micro}"
            + (f" × {devices} devices" if devices > 1 else ""),
            hint=f"global_batch_size: {micro * devices}, or {other}",
        )


def _refuse_offload_of_nothing(recipe: Recipe) -> None:
    if recipe.tuning in _LOMO and recipe.offload_optimizer in ("cpu", "nvme"):
        raise RecipeError(
            f"offload_optimizer = {recipe.offload_optimizer}, and tuning: {recipe.tuning} keeps no optimizer states",
            hint="no offload_optimizer; offload_parameters: cpu moves the weights",
        )


def _refuse_quantization(recipe: Recipe) -> None:
    asked = recipe.quantization_is_asked_for
    if recipe.quantization == "none" and recipe.quantization_bits is not None:
        raise RecipeError(
            f"quantization: none and quantization_bits = {recipe.quantization_bits} contradict each other",
            hint="leave one of them out",
        )
    if asked and recipe.tuning in ("full", *_LOMO):
        raise RecipeError(
            f"tuning: {recipe.tuning} trains every weight, and a quantised base cannot be trained",
            hint="tuning: qlora",
        )
    if recipe.tuning == "qlora" and recipe.quantization == "none":
        raise RecipeError("tuning: qlora is LoRA on a quantised base, and quantization: none forbids one",
                          hint="tuning: lora")  # fmt: skip
    if recipe.quantization == "nf4" and recipe.quantization_bits not in (None, 4):
        raise RecipeError(
            f"quantization: nf4 has 4 bits, not quantization_bits = {recipe.quantization_bits}",
            hint="quantization: hqq",
        )
    if recipe.lora_modules_to_save and recipe.tuning in ("full", *_LOMO):
        raise RecipeError(
            f"lora_modules_to_save = {recipe.lora_modules_to_save} is for modules beside adapters, and tuning: "
            f"{recipe.tuning} trains every weight anyway",
            hint="leave lora_modules_to_save out, or tuning: lora",
        )
    adapting = next((name for name in ("dora", "rslora") if getattr(recipe, name)), None)
    if adapting and recipe.tuning in ("full", *_LOMO):
        raise RecipeError(
            f"{adapting} is for adapters, and tuning: {recipe.tuning} trains none", hint="tuning: lora"
        )


def _refuse_groups(recipe: Recipe, model: ModelSpec) -> None:
    """HQQ packs whole groups of a matrix, as many together as share a byte."""
    bits = recipe.quantization_bits or 4
    if recipe.quantization != "hqq" and bits == 4:
        return
    together = 1 if bits == 3 else 8 // bits
    for linear in model.linears:
        weights = linear.in_features * linear.out_features
        if linear.adaptable and weights % (recipe.quantization_group_size * together):
            raise RecipeError(
                f"quantization_group_size = {recipe.quantization_group_size}: {linear.name} has "
                f"{linear.out_features} × {linear.in_features} weights, which leaves a rest in "
                f"{together} × groups of that size",
                hint="quantization_group_size: 64, or a power of two that divides every matrix",
            )


def _refuse_momentum(recipe: Recipe) -> None:
    if recipe.optimizer == "sgd" and "momentum" in recipe.model_fields_set and recipe.momentum > 0:
        raise RecipeError(
            f"optimizer: sgd keeps no momentum, and momentum = {recipe.momentum:g} asks for it",
            hint="optimizer: momentum",
        )


def _refuse_optimizer(recipe: Recipe, gpu: Gpu) -> None:
    if recipe.optimizer == "adamw-8bit" and gpu.is_cpu:
        raise HardwareError(
            "optimizer: adamw-8bit keeps its states in 8 bit with kernels that run on GPUs only; on a processor its "
            "library steps at a fortieth of AdamW's speed",
            hint="optimizer: adamw",
        )
    if recipe.optimizer == "adamw-8bit" and (
        recipe.backend == "deepspeed" or recipe.offload_optimizer in ("cpu", "nvme")
    ):
        raise RecipeError(
            "optimizer: adamw-8bit is stepped on the device; DeepSpeed and an offloaded optimizer keep fp32 states",
            hint="optimizer: adamw, or neither backend: deepspeed nor an offloaded optimizer",
        )


def _refuse_clipping(recipe: Recipe) -> None:
    """Only what is stepped in backward clips by value; elsewhere the norm is what everybody means."""
    if recipe.optimizer_in_backward:
        return
    if recipe.max_grad_value is not None and recipe.tuning not in (None, *_LOMO):
        raise RecipeError(
            f"max_grad_value = {recipe.max_grad_value:g} is for lomo and adalomo, and for optimizer_in_backward; "
            f"tuning: {recipe.tuning} clips by the norm",
            hint="no max_grad_value; max_grad_norm: 1.0 clips by the norm",
        )
