"""One line for each decision about adapters, added tokens and dropout, and what they cost."""

from collections.abc import Iterator
from dataclasses import replace

from fitune.estimate.parameters import dequantisation_workspace_bytes, trained_parameters
from fitune.estimate.predict import predict_memory, predict_step_time
from fitune.spec.counts import untouched_blocks
from fitune.spec.model.model_spec import NO_DROPOUT, ModelSpec
from fitune.spec.model.tensors import trained_tables
from fitune.spec.model.traits import falls_back_to_scores
from fitune.spec.plan import Dense, Lora, Plan
from fitune.spec.quantisers import is_packed
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import describe_dropout
from fitune.units import as_ranges, format_bytes, format_count, format_percent


def adapter_decisions(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Lines about added tokens, adapters and dropout, in this order."""
    yield from _added_tokens(recipe, plan)
    if isinstance(plan.tuning, Lora):
        yield from _lora(recipe, plan.tuning, plan)
        yield from _adapter_dropout(plan.tuning, plan)
    yield from _model_dropout(plan)


def _lora(recipe: Recipe, lora: Lora, plan: Plan) -> Iterator[str]:
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
            f"of {lora.rank} costs memory and gains nothing over {narrowest}"
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
    untouched = untouched_blocks(model, lora)
    if untouched:
        words += (
            f"; nothing trains before block {untouched}, so backward ends there and the {untouched} before it keep "
            "no activations, recomputed or not"
        )
    yield words


def _tables(lora: Lora, plan: Plan) -> Iterator[str]:
    """Says what training the embedding and head whole costs: they are most of what is trained."""
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
    """Experts are stacked in parameters: packed where transformers' interface runs them, adapted by name."""
    experts = [(m, count) for m, count in plan.model.counted_linears() if m.part == "experts"]
    dense = sum(count * m.weights for m, count in experts if not is_packed(m, lora.base))
    width = plan.precision.compute_bytes
    if not experts:
        return
    adapted = any(m.is_target(lora.targets) for m, _ in experts)
    can_be = all(m.stacked for m, _ in experts)
    hint = "" if adapted or not can_be else " (lora_target_modules: [all-linear, experts] adapts them)"
    words = f"{'adapted' if adapted else 'not adapted'}{hint}"
    if dense:
        packed = "" if isinstance(lora.base, Dense) else "not quantised, "
        yield (
            f"note on experts: {packed}{words}; {format_bytes(dense * width)} of weights stay in {8 * width} bit"
        )
    else:
        largest = max(dequantisation_workspace_bytes(m, element_bytes=width) for m, _ in experts)
        yield f"note on experts: quantised, {words}"
        yield f"experts: those of a block are made whole for their product, {format_bytes(largest)} at most"


def _added_tokens(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if not plan.added_tokens:
        return
    count = len(plan.added_tokens)
    yield (
        f"added_tokens: {count} more; embedding and head have {plan.model.vocab_size:,} rows then, new ones begin as "
        "the mean of the others"
    )
    if isinstance(plan.tuning, Lora) and len(recipe.lora_modules_to_save) < 2:
        yield (
            "lora_modules_to_save: embed_tokens and lm_head, because of added_tokens: beside frozen tables the new "
            "rows would stay as they began"
        )


def _adapter_dropout(lora: Lora, plan: Plan) -> Iterator[str]:
    """Every adapted linear keeps its own dropped input and the mask, where linears beside one another share one."""
    if not lora.dropout:
        return
    without = replace(plan, tuning=replace(lora, dropout=0.0))
    yield (
        f"lora_dropout: {lora.dropout:g} keeps a dropped input and a mask for each adapted linear: "
        f"{_costs(plan, without, 'lora_dropout: 0')}"
    )


def _model_dropout(plan: Plan) -> Iterator[str]:
    """The config stays as it is: its cost is said, and where it could be changed."""
    if plan.model.dropout == NO_DROPOUT:
        return
    if (
        plan.model.is_traced
    ):  # its blocks are traced with the rates of its config: there is no figure without them
        yield (
            f"{describe_dropout(plan.model.dropout)}, from the model's config, is in these figures. "
            "Rates of 0 in its config.json switch it off"
        )
        return
    without = replace(plan, model=replace(plan.model, dropout=NO_DROPOUT))
    scores = (
        "no CPU kernel has attention dropout, so the scores are kept in memory; "
        if falls_back_to_scores(plan)
        else ""
    )
    yield (
        f"{describe_dropout(plan.model.dropout)}, from the model's config: {scores}"
        f"{_costs(plan, without, 'without')}. Rates of 0 in its config.json switch it off"
    )


def _costs(plan: Plan, without: Plan, name: str) -> str:
    peaks = [predict_memory(each).peak_bytes for each in (plan, without)]
    seconds = [predict_step_time(each).step_seconds for each in (plan, without)]
    return (
        f"{format_bytes(max(0, peaks[0] - peaks[1]))} more at the peak than {name}, and a step takes "
        f"{format_percent(seconds[0] / seconds[1] - 1)} longer"
    )
