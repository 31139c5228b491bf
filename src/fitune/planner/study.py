"""Beside the plan of a recipe: the plan with a change on top, and the largest that fits with each method."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from fitune.errors import RecipeError
from fitune.estimate.division import num_ranks
from fitune.planner.candidates import Method, Request
from fitune.planner.defaults import ROW_STEP
from fitune.planner.explain import memory_sum
from fitune.planner.fit import OFFLOADED, TIE, last_true
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods_for
from fitune.planner.nothing_fits import largest_known_model
from fitune.planner.search import first_choice, refuse_contradictions
from fitune.recipe.recipe import Recipe
from fitune.units import format_bytes, format_percent, format_rate, format_seconds, wrapped
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Plan
from fitune.values.predictions import Priced
from fitune.values.rules import keeps_rules
from fitune.values.words import (
    describe_base_of,
    describe_plan,
    method_name,
)


def plan_with_change(
    changed: Recipe, change: str, *, taken: Priced, model: ModelSpec, hardware: Hardware
) -> Priced:
    """The best plan of the ``changed`` recipe with the tuning of ``taken``, unless the change is about that; when
    nothing fits, the smallest plan stands for it. Raises RecipeError where no plan can have the change.
    """
    request = Request.of(changed, model, hardware)
    refuse_contradictions(request)
    is_about_tuning = changed.tuning is not None or changed.quantization_is_asked_for
    own = method_name(taken.plan.tuning)

    def is_like(method: Method) -> bool:
        """True for the plan's own method in the precision that is asked for; for every method where tuning changes."""
        same = method_name(method.tuning) == own and changed.precision in (None, method.precision.value)
        return is_about_tuning or same

    pinned = first_choice(replace(request, wanted=is_like))
    if pinned is None:
        raise RecipeError(f"{change}: no plan of this recipe can have this setting", hint="fewer pins")
    return pinned


def explain_change(change: str, *, taken: Priced, pinned: Priced, objective: str) -> str:
    """The plan of the recipe, the best one with the change, then what that changes, in bytes and seconds."""
    marks = [
        "" if keeps_rules(each.plan, "train") else " (only planned: fitune plan says what is trained instead)"
        for each in (taken, pinned)
    ]
    lines = [f"taken{marks[0]}", wrapped(describe_plan(taken.plan)), f"with {change}{marks[1]}"]
    if pinned.plan == taken.plan:
        return "\n".join([*lines, wrapped("the same plan: that is what was taken")])
    lines += [wrapped(describe_plan(pinned.plan)), "", *_differences(taken, pinned), ""]
    return "\n".join([*lines, wrapped(_verdict(taken, pinned, objective))])


def _verdict(taken: Priced, pinned: Priced, objective: str) -> str:
    if not pinned.estimate.fits:
        return f"does not fit: {memory_sum(pinned.estimate)}"
    ratio = taken.estimate.tokens_per_second / pinned.estimate.tokens_per_second
    is_open = objective != "least-memory" and _is_choice_of_the_search(pinned.plan, taken.plan)
    if is_open and TIE < ratio < 1 / TIE:
        return f"fits and is as fast within {format_percent(1 - TIE, digits=0)}; of such plans the simplest is taken"
    if is_open and ratio < 1:
        enough = format_percent(1 / OFFLOADED - 1, digits=0)
        return f"fits and takes {ratio:.2f} × the time: offload is taken only where it gains {enough}"
    return f"fits and takes {ratio:.2f} × the time per token"


def _is_choice_of_the_search(pinned: Plan, taken: Plan) -> bool:
    """True if they differ only in what the search decides by speed: placement, loss, recomputed blocks, and the split
    of the same batch."""
    split = replace(
        pinned.batch,
        micro_batch_size=taken.batch.micro_batch_size,
        accumulation=taken.batch.accumulation,
    )
    alike = replace(
        pinned, sharding=taken.sharding, offload=taken.offload, recompute=taken.recompute, loss=taken.loss,
        batch=split, run=replace(pinned.run, async_save=taken.run.async_save),
    )  # fmt: skip
    return alike == taken and pinned.batch.global_batch_size == taken.batch.global_batch_size


def _differences(one: Priced, other: Priced) -> Iterator[str]:
    """Rows of a quantity, both plans' figures and the change."""
    pairs = [(each.estimate, each.plan) for each in (one, other)]

    def size(name: str, *sizes: int) -> Iterator[tuple[str, ...]]:
        """A row of bytes, unless both are 0."""
        taken, pinned = sizes
        if format_bytes(taken) != "0 B" or format_bytes(pinned) != "0 B":
            change = f"{'+' if pinned >= taken else '−'}{format_bytes(abs(pinned - taken))}"
            yield name, format_bytes(taken), format_bytes(pinned), change

    def ratio(name: str, words: Callable[[float], str], *values: float) -> tuple[str, ...]:
        """A row of seconds or speeds."""
        return name, *map(words, values), f"× {values[1] / values[0]:.2f}"

    rows = [plan.batch.global_batch_size * num_ranks(plan) for _, plan in pairs]
    for name, taken, pinned, change in (
        ("", "taken", "with it", "change"),
        *size("a device at its peak", *(each.peak_bytes for each, _ in pairs)),
        *size("a node's host memory", *(each.host_bytes for each, _ in pairs)),
        *size("a node's NVMe", *(each.nvme_bytes for each, _ in pairs)),
        ("rows in a step", *(f"{count:,}" for count in rows), f"{rows[1] - rows[0]:+,}"),
        *size("sent in a step", *(each.communication_bytes for each, _ in pairs)),
        ratio("a step", format_seconds, *(each.step_seconds for each, _ in pairs)),
        ratio("speed", format_rate, *(each.tokens_per_second for each, _ in pairs)),
    ):
        yield f"  {name:<22}{taken:>18}{pinned:>18}{change:>18}"


Quantity = Literal["seq_len", "micro_batch", "model"]
QUANTITIES: tuple[Quantity, ...] = ("seq_len", "micro_batch", "model")
MOST_ROWS = 4096


Label = tuple[str, str, str]
"""Tuning, base and precision of a method, in words."""
Largest = dict[Label, int | str | None]
"""The largest of a quantity by method: tokens, rows or a model's name; None when nothing fits."""


def largest(recipe: Recipe, quantity: str, *, model: ModelSpec, hardware: Hardware) -> Largest:
    """The largest ``quantity`` that fits, by method that the recipe leaves open, by bisection: bytes only grow with it.

    Rows are tried in steps of 64 up to the model's longest, micro-batches without accumulation, models from the
    table of known ones. Weights and optimizer stay on the device unless the recipe says
    otherwise. Raises RecipeError for another quantity and for contradictions.
    """
    if quantity not in QUANTITIES:
        raise RecipeError(f"--largest {quantity} is not known", hint=f"one of {', '.join(QUANTITIES)}")
    request = Request.of(recipe, model, hardware)
    request = replace(request, recipe=_small(request.recipe))
    refuse_contradictions(request)
    offloads = {"cpu", "nvme"} & {recipe.offload_parameters, recipe.offload_optimizer}
    found: Largest = {}
    for method in methods_for(request):
        one = MethodSearch(request, method, on_device=not offloads)
        if _label(method) not in found and one.placements:
            found[_label(method)] = _value(quantity, one)
    return found


def _small(recipe: Recipe) -> Recipe:
    """One row at a time and nothing accumulated, where the recipe leaves that open."""
    pins = {
        "micro_batch_size": recipe.micro_batch_size or 1,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps or 1,
        "global_batch_size": None,
    }
    return recipe.model_copy(update=pins)


def _label(method: Method) -> Label:
    return method_name(method.tuning), describe_base_of(method.tuning), method.precision.value


def _value(quantity: str, one: MethodSearch) -> int | str | None:
    request = one.request

    def fits(**pins: int) -> bool:
        """True if the method fits with these settings pinned."""
        return replace(one, request=request.with_pins(**pins)).fits()

    def model_fits(other: Request) -> bool:
        """True if the same method fits for the request ``other``, whose model is another one."""
        alike = next((each for each in methods_for(other) if _label(each) == _label(one.method)), None)
        return alike is not None and replace(one, request=other, method=alike).fits()

    match quantity:
        case "seq_len":
            longest = request.model.max_seq_len
            steps = last_true(
                lambda n: fits(seq_len=min(n * ROW_STEP, longest)), 0, -(-longest // ROW_STEP) + 1
            )
            return min(steps * ROW_STEP, longest) or None
        case "micro_batch":
            return last_true(lambda rows: fits(micro_batch_size=rows), 0, MOST_ROWS + 1) or None
        case _:
            return largest_known_model(request, model_fits)


def explain_largest(recipe: Recipe, quantity: str, found: Largest) -> str:
    """One line for each method."""
    small = _small(recipe)
    steps = small.gradient_accumulation_steps
    batch = f"{small.micro_batch_size} × {steps} accumulated"
    what = {
        "seq_len": f"longest row in tokens, batch {batch} a device",
        "micro_batch": (
            f"most rows of {recipe.seq_len} tokens in a micro-batch, {steps} accumulated, up to {MOST_ROWS:,}"
        ),
        "model": f"largest known model, rows of {recipe.seq_len} tokens, batch {batch} a device",
    }[quantity]
    lines = [what]
    for (name, base, precision), value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else value or "none fits"
        lines.append(f"  {', '.join(filter(None, (name, precision, base))):<60}{shown:>34}")
    return "\n".join(lines)


def largest_data(quantity: str, found: Largest) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    keys = ("tuning", "base", "precision", "value")
    rows = [dict(zip(keys, (*label, value), strict=True)) for label, value in found.items()]
    return {"largest": quantity, "methods": rows}
