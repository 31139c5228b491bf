"""Settings of a recipe that contradict each other whatever plan is made of them.

What a Plan can say and cannot be is in rules.py. Here is what no Plan can even say: a setting that would be left
unused, two settings for one thing, a batch that cannot be divided.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from fitune.errors import RecipeError
from fitune.spec.quantisers import QUANTISERS
from fitune.spec.recipe import Recipe

_EVERY_WEIGHT = ("full", "lomo", "adalomo")
_IN_BACKWARD = ("lomo", "adalomo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """``broken`` is true for a recipe that contradicts itself; the other two say it and what to do instead."""

    broken: Callable[[Recipe], bool]
    why: Callable[[Recipe], str]
    instead: str


def require_consistent(recipe: Recipe, *, devices: int) -> None:
    """Raises RecipeError for the first contradiction, with the arithmetic. ``devices`` share the global batch."""
    for one in CONTRADICTIONS:
        if one.broken(recipe):
            raise RecipeError(one.why(recipe), hint=one.instead)
    for why, instead in _uneven_batches(recipe, devices):
        raise RecipeError(why, hint=instead)


def _is_set(recipe: Recipe, name: str) -> bool:
    return name in recipe.model_fields_set


def _adapting(recipe: Recipe) -> str | None:
    """A setting that only adapters have."""
    names = ("dora", "rslora", "lora_modules_to_save")
    return next((name for name in names if getattr(recipe, name)), None)


def _asks_for_adapters(recipe: Recipe) -> bool:
    narrowing = recipe.quantization_is_asked_for or recipe.dora or recipe.rslora
    return recipe.tuning in ("lora", "qlora") or narrowing or recipe.export in ("adapter", "merged")


def _widths(recipe: Recipe) -> tuple[int, ...]:
    return QUANTISERS[recipe.quantization].widths if recipe.quantization else ()


def _in_backward(recipe: Recipe) -> bool:
    return recipe.tuning in _IN_BACKWARD or recipe.optimizer_in_backward


CONTRADICTIONS = (
    Contradiction(
        broken=lambda r: r.quantization == "none" and r.quantization_bits is not None,
        why=lambda r: (
            f"quantization: none and quantization_bits = {r.quantization_bits} contradict each other"
        ),
        instead="leave one of them out",
    ),
    Contradiction(
        broken=lambda r: r.quantization_is_asked_for and r.tuning in _EVERY_WEIGHT,
        why=lambda r: f"tuning: {r.tuning} trains every weight, and a quantised base cannot be trained",
        instead="tuning: qlora",
    ),
    Contradiction(
        broken=lambda r: r.tuning == "qlora" and r.quantization == "none",
        why=lambda r: "tuning: qlora is LoRA on a quantised base, and quantization: none forbids one",
        instead="tuning: lora",
    ),
    Contradiction(
        broken=lambda r: r.quantization in QUANTISERS and r.quantization_bits not in (None, *_widths(r)),
        why=lambda r: (
            f"quantization: {r.quantization} has {' or '.join(map(str, _widths(r)))} bits, not quantization_bits = "
            f"{r.quantization_bits}"
        ),
        instead="leave quantization out: the first quantiser with these bits is taken",
    ),
    Contradiction(
        broken=lambda r: r.tuning in _EVERY_WEIGHT and _adapting(r) is not None,
        why=lambda r: (
            f"{_adapting(r)} is for adapters, and tuning: {r.tuning} trains none: it trains every weight"
        ),
        instead="tuning: lora, or leave it out",
    ),
    Contradiction(
        broken=lambda r: r.optimizer_in_backward and _asks_for_adapters(r),
        why=lambda r: (
            "optimizer_in_backward spares the gradients of all weights, and adapters are hundreds of times fewer: "
            "there is next to nothing to gain"
        ),
        instead="leave optimizer_in_backward out, or tuning: full",
    ),
    Contradiction(
        broken=lambda r: (
            r.max_grad_value is not None
            and r.tuning not in (None, *_IN_BACKWARD)
            and not r.optimizer_in_backward
        ),
        why=lambda r: (
            f"max_grad_value = {r.max_grad_value:g} is for lomo and adalomo, and for optimizer_in_backward; tuning: "
            f"{r.tuning} clips by the norm"
        ),
        instead="no max_grad_value; max_grad_norm: 1.0 clips by the norm",
    ),
    Contradiction(
        broken=lambda r: r.optimizer == "sgd" and _is_set(r, "momentum") and r.momentum > 0,
        why=lambda r: f"optimizer: sgd keeps no momentum, and momentum = {r.momentum:g} asks for it",
        instead="optimizer: momentum",
    ),
    Contradiction(
        broken=lambda r: r.loss == "plain" and r.loss_chunk_tokens is not None,
        why=lambda r: (
            f"loss: plain makes all logits at once, and loss_chunk_tokens = {r.loss_chunk_tokens} asks for chunks"
        ),
        instead="loss: chunked",
    ),
    Contradiction(
        broken=lambda r: r.zero == 0 and r.backend is not None,
        why=lambda r: f"zero: 0 is DDP, which needs no backend, and backend = {r.backend}",
        instead="zero: 1, 2 or 3",
    ),
    Contradiction(
        broken=lambda r: r.val_fraction > 0 and bool(r.eval_data),
        why=lambda r: (
            f"val_fraction = {r.val_fraction:g} holds rows out, and eval_data names rows to evaluate on"
        ),
        instead="keep one of them",
    ),
    Contradiction(
        broken=lambda r: r.eval_steps > 0 and bool(r.data) and not r.eval_data and not r.val_fraction,
        why=lambda r: f"eval_steps = {r.eval_steps}, and there is nothing to evaluate on",
        instead="val_fraction: 0.05 holds rows out, eval_data names a file of them",
    ),
)


def _uneven_batches(recipe: Recipe, devices: int) -> Iterator[tuple[str, str]]:
    """A global batch that the pinned parts of it do not make: (why, instead)."""
    whole = recipe.global_batch_size
    if whole is None:
        return
    micro, steps = recipe.micro_batch_size, recipe.gradient_accumulation_steps
    pinned = [(f"{devices} devices", devices)] if devices > 1 else []
    pinned += [(f"micro_batch_size {micro}", micro)] if micro is not None else []
    pinned += [(f"gradient_accumulation_steps {steps}", steps)] if steps is not None else []
    shown, each = " × ".join(name for name, _ in pinned), prod(count for _, count in pinned)
    if micro is not None and _in_backward(recipe) and each < whole:
        who = "optimizer_in_backward" if recipe.optimizer_in_backward else f"tuning: {recipe.tuning}"
        yield (
            f"{who} takes one micro-batch a step, and global_batch_size {whole} is {whole / each:g} × {shown}",
            f"global_batch_size: {each}, or tuning: full without optimizer_in_backward",
        )
    if micro is not None and steps is not None and each != whole:
        yield (
            f"{shown} = {each}, not global_batch_size {whole}",
            f"leave one of them open, or global_batch_size: {each}",
        )
    if whole % each:
        yield (
            f"global_batch_size {whole} cannot be divided evenly: {whole} / ({shown}) = {whole / each:.2f}",
            f"global_batch_size: {-(-whole // each) * each}",
        )
