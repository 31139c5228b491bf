"""The largest row, micro-batch or model that still fits, method by method."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fitune.errors import RecipeError
from fitune.planner.added_tokens import with_added_rows
from fitune.planner.defaults import with_usual_row
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import Method, Tier
from fitune.planner.precision import methods_for
from fitune.planner.refusals import refuse_contradictions
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.model_config import load_model_spec
from fitune.spec.model_table import known_model_names
from fitune.spec.parameters import count_parameters
from fitune.spec.recipe import Recipe
from fitune.spec.words import describe_base_of, method_name

Quantity = Literal["seq_len", "micro_batch", "model"]
QUANTITIES: tuple[Quantity, ...] = ("seq_len", "micro_batch", "model")
ROW_STEP = 64
MOST_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """``value``: tokens, rows or a model's name; None when nothing fits."""

    method: Method
    value: int | str | None


def largest(recipe: Recipe, quantity: str, *, model: ModelSpec, hardware: Hardware) -> tuple[Largest, ...]:
    """For every method the recipe leaves open, by bisection: bytes only grow with tokens.

    Rows are tried in steps of 64 up to the model's longest, micro-batches without accumulation, models from the
    table of known ones. Weights and optimizer stay on the device unless the recipe says
    otherwise. Raises RecipeError for another quantity and for contradictions.
    """
    if quantity not in QUANTITIES:
        raise RecipeError(f"--largest {quantity} is not known", hint=f"one of {', '.join(QUANTITIES)}")
    model = with_added_rows(recipe, model)
    recipe = _small(with_usual_row(recipe, model))
    refuse_contradictions(recipe, model=model, hardware=hardware)
    found: dict[tuple[str, str, str], Largest] = {}
    tier: Tier = "any" if _offload_is_asked_for(recipe) else "device"
    for method in methods_for(recipe, model=model, hardware=hardware):
        method = replace(method, tier=tier)
        is_possible = bool(MethodSearch(recipe, method, model, hardware).placements)
        if _label(method) not in found and is_possible:
            value = _value(quantity, recipe, method, model, hardware)
            found[_label(method)] = Largest(method=method, value=value)
    return tuple(found.values())


def _small(recipe: Recipe) -> Recipe:
    """One row at a time and nothing added up, where the recipe leaves that open."""
    pins = {
        "micro_batch_size": recipe.micro_batch_size or 1,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps or 1,
        "global_batch_size": None,
    }
    return recipe.model_copy(update=pins)


def _offload_is_asked_for(recipe: Recipe) -> bool:
    pins = (recipe.offload_parameters, recipe.offload_optimizer)
    return any(place in ("cpu", "nvme") for place in pins)


def _value(
    quantity: str, recipe: Recipe, method: Method, model: ModelSpec, hardware: Hardware
) -> int | str | None:
    match quantity:
        case "seq_len":
            return _longest_row(recipe, method, model, hardware)
        case "micro_batch":
            return _most_rows(recipe, method, model, hardware)
        case _:
            return _largest_model(recipe, method, hardware)


def _longest_row(recipe: Recipe, method: Method, model: ModelSpec, hardware: Hardware) -> int | None:
    def fits(steps: int) -> bool:
        changed = recipe.model_copy(update={"seq_len": min(steps * ROW_STEP, model.max_seq_len)})
        return MethodSearch(changed, method, model, hardware).fits()

    steps = _bisect(fits, most=-(-model.max_seq_len // ROW_STEP))
    return min(steps * ROW_STEP, model.max_seq_len) if steps else None


def _most_rows(recipe: Recipe, method: Method, model: ModelSpec, hardware: Hardware) -> int | None:
    def fits(rows: int) -> bool:
        return MethodSearch(
            recipe.model_copy(update={"micro_batch_size": rows}), method, model, hardware
        ).fits()

    return _bisect(fits, most=MOST_ROWS) or None


def _largest_model(recipe: Recipe, method: Method, hardware: Hardware) -> str | None:
    """The same method, its adapters on all linears, whose names differ from model to model."""
    known = (load_model_spec(name, offline=True) for name in known_model_names())
    for model in sorted(known, key=lambda model: count_parameters(model).total, reverse=True):
        pins = {
            "seq_len": min(recipe.seq_len, model.max_seq_len),
            "lora_target_modules": ["all-linear"],
            "lora_layers": [],
        }
        changed = recipe.model_copy(update=pins)
        for other in methods_for(changed, model=model, hardware=hardware):
            if _label(other) == _label(method):
                if MethodSearch(changed, replace(other, tier=method.tier), model, hardware).fits():
                    return model.name
                break
    return None


def _bisect(fits: Callable[[int], bool], *, most: int) -> int:
    """The largest of 1…most that fits, 0 when none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _label(method: Method) -> tuple[str, str, str]:
    return method_name(method.tuning), describe_base_of(method.tuning), method.precision.value


def explain_largest(recipe: Recipe, quantity: str, found: tuple[Largest, ...]) -> str:
    """One line for each method."""
    small = _small(recipe)
    batch = f"{small.micro_batch_size} × {small.gradient_accumulation_steps} accumulated"
    what = {
        "seq_len": f"longest row in tokens, batch {batch} a device",
        "micro_batch": (
            f"most rows of {recipe.seq_len} tokens in a micro-batch, {small.gradient_accumulation_steps} accumulated, "
            f"up to {MOST_ROWS:,}"
        ),
        "model": f"largest known model, rows of {recipe.seq_len} tokens, batch {batch} a device",
    }[quantity]
    lines = [what]
    for item in found:
        name, base, precision = _label(item.method)
        words = f"{name}, {precision}" + (f", {base}" if base else "")
        value = f"{item.value:,}" if isinstance(item.value, int) else item.value or "none fits"
        lines.append(f"  {words:<60}{value:>34}")
    return "\n".join(lines)


def largest_data(quantity: str, found: tuple[Largest, ...]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    rows = []
    for item in found:
        name, base, precision = _label(item.method)
        rows.append({"tuning": name, "base": base, "precision": precision, "value": item.value})
    return {"largest": quantity, "methods": rows}
