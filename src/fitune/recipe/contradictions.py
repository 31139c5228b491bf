"""Settings of a recipe that contradict each other whatever plan is made of them.

What a Plan can say and cannot be is in rules.py. Here is what no Plan can even say: a setting that would be left
unused, two settings for one thing, a batch that cannot be divided.
"""

from collections.abc import Iterator
from math import prod

from fitune.errors import RecipeError
from fitune.recipe.recipe import Recipe
from fitune.values.quantisers import QUANTISERS

_IN_BACKWARD = ("lomo", "adalomo")
_EVERY_WEIGHT = ("full", *_IN_BACKWARD)
ADAPTERS_ONLY = ("dora", "rslora", "lora_modules_to_save", "lora_layers")
"""Keys that choose what is trained, among adapters."""


def require_consistent(recipe: Recipe, *, devices: int) -> None:
    """Raises RecipeError for the first contradiction, with the arithmetic. ``devices`` share the global batch."""
    for contradictions in (_method(recipe), _others(recipe), _uneven_batches(recipe, devices)):
        for why, instead in contradictions:
            raise RecipeError(why, hint=instead)


def source_weights(recipe: Recipe) -> list[float]:
    """The weight of each source of ``data``, from ``data_weights`` or from the source itself.

    Raises RecipeError when the numbers do not match the sources, or both say a weight.
    """
    weights, sources = recipe.data_weights, recipe.data
    if not weights:
        return [source.weight for source in sources]
    if len(weights) != len(sources):
        named = ", ".join(source.path for source in sources) or "none"
        raise RecipeError(
            f"data_weights has {len(weights)} numbers ({', '.join(f'{w:g}' for w in weights)}), and data names "
            f"{len(sources)} sources: {named}",
            hint="one number for each source, in their order",
        )
    if twice := next((source for source in sources if "weight" in source.model_fields_set), None):
        raise RecipeError(
            f"data_weights is set, and {twice.path} has weight {twice.weight:g} of its own",
            hint="keep one of them",
        )
    return weights


def _method(r: Recipe) -> Iterator[tuple[str, str]]:
    """Contradictions about what is trained: (why, instead)."""
    if r.quantization == "none" and r.quantization_bits is not None:
        why = f"quantization: none and quantization_bits = {r.quantization_bits} contradict each other"
        yield why, "leave one of them out"
    if r.quantization_is_asked_for and r.tuning in _EVERY_WEIGHT:
        yield (
            f"tuning: {r.tuning} trains every weight, and a quantised base cannot be trained",
            "tuning: qlora",
        )
    if r.tuning == "qlora" and r.quantization == "none":
        why = "tuning: qlora is LoRA on a quantised base, and quantization: none forbids one"
        yield why, "tuning: lora"
    widths = QUANTISERS[r.quantization].widths if r.quantization in QUANTISERS else ()
    if widths and r.quantization_bits not in (None, *widths):
        has = f"{' or '.join(map(str, widths))} bits"
        why = f"quantization: {r.quantization} has {has}, not quantization_bits = {r.quantization_bits}"
        yield why, "leave quantization out: the first quantiser with these bits is taken"
    only_adapters = [name for name in ADAPTERS_ONLY if getattr(r, name)]
    if r.tuning in _EVERY_WEIGHT and only_adapters:
        why = (
            f"{only_adapters[0]} is for adapters, and tuning: {r.tuning} trains none: it trains every weight"
        )
        yield why, "tuning: lora, or leave it out"
    if r.optimizer_in_backward and (r.tuning in ("lora", "qlora") or r.adapters_asked_by):
        yield (
            "optimizer_in_backward spares the gradients of all weights, and adapters are hundreds of times fewer: "
            "there is next to nothing to gain",
            "leave optimizer_in_backward out, or tuning: full",
        )
    clips_by_norm = r.tuning not in (None, *_IN_BACKWARD) and not r.optimizer_in_backward
    if r.max_grad_value is not None and clips_by_norm:
        yield (
            f"max_grad_value = {r.max_grad_value:g} is for lomo and adalomo, and for optimizer_in_backward; tuning: "
            f"{r.tuning} clips by the norm",
            "no max_grad_value; max_grad_norm: 1.0 clips by the norm",
        )


def _others(r: Recipe) -> Iterator[tuple[str, str]]:
    """Contradictions about optimizer, loss, sharding and evaluation: (why, instead)."""
    if r.optimizer == "sgd" and "momentum" in r.model_fields_set and r.momentum > 0:
        why = f"optimizer: sgd keeps no momentum, and momentum = {r.momentum:g} asks for it"
        yield why, "optimizer: momentum"
    if r.min_lr_ratio and r.lr_scheduler == "constant":
        why = (
            f"lr_scheduler: constant never falls, and min_lr_ratio = {r.min_lr_ratio:g} says what it falls to"
        )
        yield why, "lr_scheduler: cosine, or no min_lr_ratio"
    if r.loss == "plain" and r.loss_chunk_tokens is not None:
        yield (
            f"loss: plain makes all logits at once, and loss_chunk_tokens = {r.loss_chunk_tokens} asks for chunks",
            "loss: chunked",
        )
    if r.zero == 0 and r.backend is not None:
        yield f"zero: 0 is DDP, which needs no backend, and backend = {r.backend}", "zero: 1, 2 or 3"
    if "://" in (r.output_dir or "") and r.upload_to:
        why = f"output_dir = {r.output_dir} is a URL, and upload_to = {r.upload_to} names another"
        yield why, "output_dir: a folder of this machine, or no upload_to"
    if r.upload_to and "://" not in r.upload_to:
        yield (
            f"upload_to = {r.upload_to} is no URL",
            "upload_to: s3://bucket/runs/x; output_dir: for a folder",
        )
    if r.hub_public and not r.push_to_hub:
        yield "hub_public: true, and nothing is pushed", "push_to_hub: OWNER/NAME, or no hub_public"
    for steps, parts in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        if getattr(r, steps) and getattr(r, parts):
            why = f"{steps} = {getattr(r, steps)} and {parts} = {getattr(r, parts)} both say how often"
            yield why, "keep one of them"
    if r.val_fraction > 0 and r.eval_data:
        why = f"val_fraction = {r.val_fraction:g} holds rows out, and eval_data names rows to evaluate on"
        yield why, "keep one of them"
    often = "eval_steps" if r.eval_steps else "evals_per_epoch"
    if getattr(r, often) > 0 and r.data and not r.eval_data and not r.val_fraction:
        why = f"{often} = {getattr(r, often)}, and there is nothing to evaluate on"
        yield why, "val_fraction: 0.05 holds rows out, eval_data names a file of them"


def _uneven_batches(recipe: Recipe, devices: int) -> Iterator[tuple[str, str]]:
    """A global batch that the pinned parts of it do not make: (why, instead)."""
    whole = recipe.global_batch_size
    if whole is None:
        return
    micro, steps = recipe.micro_batch_size, recipe.gradient_accumulation_steps
    pinned = [(f"{devices} devices", devices)] if devices > 1 else []
    pinned += [(f"micro_batch_size {micro}", micro)] if micro is not None else []
    pinned += [(f"gradient_accumulation_steps {steps}", steps)] if steps is not None else []
    in_backward = recipe.tuning in _IN_BACKWARD or recipe.optimizer_in_backward
    shown, each = " × ".join(name for name, _ in pinned), prod(count for _, count in pinned)
    if micro is not None and in_backward and each < whole:
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
        even = f"global_batch_size: {-(-whole // each) * each}"
        if recipe.resume:
            even = "what divides it: a run goes on with the global batch that it began with"
        yield (
            f"global_batch_size {whole} cannot be divided evenly: {whole} / ({shown}) = {whole / each:.2f}",
            even,
        )
