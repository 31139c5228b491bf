"""What was decided about adapters, and what follows from what was asked of them."""

from collections.abc import Iterator

from fitune.estimate.parameters import trained_parameters
from fitune.estimate.tensors import trained_tables
from fitune.spec.model import ModelSpec
from fitune.spec.parameters import blocks_gone_back_through
from fitune.spec.plan import Dense, Lora, Plan
from fitune.spec.recipe import Recipe
from fitune.spec.targets import as_ranges
from fitune.units import format_bytes, format_count


def lora_decisions(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Nothing where the plan trains no adapters."""
    if not isinstance(plan.tuning, Lora):
        return
    lora = plan.tuning
    if recipe.lora_alpha is None:
        yield f"lora_alpha: {lora.alpha} = 2 · lora_r {lora.rank}"
    yield from _useless_rank(lora, plan.model)
    yield from _targets(recipe, lora)
    yield from _layers(lora, plan.model)
    if lora.rslora:
        root = lora.rank**0.5
        yield (
            f"rslora: what adapters add is scaled by alpha / √r = {lora.alpha} / {root:.4g} = "
            f"{lora.alpha / root:.4g}; without it by alpha / r = {lora.alpha / lora.rank:.4g}"
        )
    yield from _tables(lora, plan)
    yield from _left_in_16_bit(lora, plan)


def _useless_rank(lora: Lora, model: ModelSpec) -> Iterator[str]:
    narrowest = max(min(m.in_features, m.out_features) for m in model.linears if m.adaptable)
    if lora.rank > narrowest:
        yield (
            f"note on lora_r: no linear has more than {narrowest} dimensions on its narrow side; a rank "
            f"of {lora.rank} costs memory and can say no more than {narrowest}"
        )


def _targets(recipe: Recipe, lora: Lora) -> Iterator[str]:
    if recipe.lora_target_modules == ["all-linear"]:
        yield f"LoRA targets: all linears of a block that take adapters: {', '.join(lora.targets)}"
    elif set(recipe.lora_target_modules) != set(lora.targets):
        yield f"LoRA targets: {', '.join(recipe.lora_target_modules)} means {', '.join(lora.targets)}"


def _layers(lora: Lora, model: ModelSpec) -> Iterator[str]:
    if not lora.layers:
        return
    words = f"LoRA blocks: {as_ranges(lora.layers)} of 0–{model.num_layers - 1}"
    untouched = model.num_layers - blocks_gone_back_through(model, lora)
    if untouched:
        words += (
            f"; nothing trains before block {untouched}, so backward ends there and the {untouched} before it keep "
            "no activations, recomputed or not"
        )
    yield words


def _tables(lora: Lora, plan: Plan) -> Iterator[str]:
    """What training them whole costs: they are most of what is trained."""
    tables = trained_tables(plan.model, lora)
    if not tables:
        return
    count = sum(tensor.elements for tensor in tables)
    tied = ", one tensor," if plan.model.tied_embeddings else ""
    share = f"{format_count(count)} of the {format_count(trained_parameters(plan))} trained parameters"
    yield (
        f"note on lora_modules_to_save: {' and '.join(lora.modules_to_save)}{tied} train whole, {share}; they are part "
        "of every checkpoint and of the adapter. vLLM takes no such adapter: export: merged for it"
    )


def _left_in_16_bit(lora: Lora, plan: Plan) -> Iterator[str]:
    """Experts that transformers holds as bare parameters are neither quantised nor adapted."""
    bare = plan.model.num_layers * sum(m.weights for m in plan.model.linears if not m.adaptable)
    size = bare * plan.precision.compute_bytes
    if bare:
        packed = "neither quantised nor adapted" if not isinstance(lora.base, Dense) else "not adapted"
        yield (
            f"note on experts: they are bare parameters and {packed}; "
            f"{format_bytes(size)} of weights stay in {8 * plan.precision.compute_bytes} bit"
        )
