"""Alternatives to a plan: the one with some settings pinned, and the largest that fits with each method."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fitune.errors import RecipeError
from fitune.estimate.division import num_ranks
from fitune.estimate.predict import predict
from fitune.planner.candidates import Method, Request
from fitune.planner.defaults import ROW_STEP
from fitune.planner.fit import OFFLOADED, TIE, last_true, shortage
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods_for
from fitune.planner.nothing_fits import largest_known_model
from fitune.planner.reasons.explain import memory_sum, priced_data
from fitune.planner.search import refuse_contradictions, saving_beside_steps, search
from fitune.spec.machines.hardware import Hardware
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.plan import Plan
from fitune.spec.predictions import Priced
from fitune.spec.recipe.recipe import Recipe, canonical_keys, given_keys, parse_recipe
from fitune.spec.recipe.strict_yaml import parse_value
from fitune.spec.rules import keeps_rules
from fitune.spec.words import describe_base_of, describe_plan, method_name
from fitune.units import format_bytes, format_percent, format_rate, format_seconds, wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """``taken`` is the plan of the recipe, ``pinned`` the best with the change; it may not fit."""

    change: str
    taken: Priced
    pinned: Priced


_KEY_EQUALS = re.compile(r"((?:^|,)\s*[\w.-]+)\s*=")


def changed_recipe(recipe: Recipe, change: str) -> Recipe:
    """The recipe with the settings of ``zero: 3, backend: fsdp`` on top. Raises RecipeError as a recipe would."""
    if not any(mark in change for mark in ":="):
        raise RecipeError(
            f"--why {change!r} sets nothing",
            hint='settings as in a recipe: "zero: 3, backend: fsdp"',
        )
    text = change if change.lstrip().startswith("{") else "{" + _KEY_EQUALS.sub(r"\1: ", change) + "}"
    wanted = parse_value(text, where="--why")
    if not isinstance(wanted, dict) or not wanted or None in wanted.values():
        raise RecipeError("--why sets nothing", hint='--why "zero: 3"')
    return parse_recipe({**given_keys(recipe), **canonical_keys(wanted, where="--why")}, where="--why")


def compare(
    changed: Recipe, change: str, *, taken: Priced, model: ModelSpec, hardware: Hardware
) -> Alternative:
    """Search with the change and the same tuning; when nothing fits, the smallest plan stands for it."""
    request = Request.of(changed, model, hardware)
    refuse_contradictions(request)
    answers = list(search(request, wanted=_like(taken.plan, changed)))
    fitting = [saving_beside_steps(changed, answer.found[0].plan) for answer in answers if answer.found]
    smallest = [answer.smallest for answer in answers if answer.smallest is not None]
    if not fitting and not smallest:
        raise RecipeError(f"{change}: no plan of this recipe can have this setting", hint="fewer pins")
    plan = fitting[0] if fitting else min(smallest, key=shortage).plan
    return Alternative(change=change, taken=taken, pinned=Priced(plan=plan, estimate=predict(plan)))


def _like(plan: Plan, changed: Recipe) -> Callable[[Method], bool]:
    """True for methods with the plan's own tuning, unless the change is about the tuning."""
    is_open = changed.tuning is None and not changed.quantization_is_asked_for

    def is_like(method: Method) -> bool:
        """True for the plan's own method in the precision that is asked for; for every method where tuning changes."""
        same = method_name(method.tuning) == method_name(plan.tuning)
        return not is_open or (same and changed.precision in (None, method.precision.value))

    return is_like


def explain_alternative(alternative: Alternative) -> str:
    """Both plans, then what changes, in bytes and seconds."""
    taken, pinned = alternative.taken, alternative.pinned
    lines = [
        f"taken{_only_planned(taken)}",
        wrapped(describe_plan(taken.plan)),
        f"with {alternative.change}{_only_planned(pinned)}",
    ]
    if pinned.plan == taken.plan:
        return "\n".join([*lines, wrapped("the same plan: that is what was taken")])
    lines += [wrapped(describe_plan(pinned.plan)), "", *_table(taken, pinned), ""]
    return "\n".join([*lines, wrapped(_verdict(pinned, taken))])


def _only_planned(priced: Priced) -> str:
    return (
        ""
        if keeps_rules(priced.plan, "train")
        else " (only planned: fitune plan says what is trained instead)"
    )


def _verdict(pinned: Priced, taken: Priced) -> str:
    if not pinned.estimate.fits:
        return f"does not fit: {memory_sum(pinned.estimate)}"
    ratio = taken.estimate.tokens_per_second / pinned.estimate.tokens_per_second
    if pinned.plan.tuning == taken.plan.tuning and TIE < ratio < 1 / TIE:
        return f"fits and is as fast within {format_percent(1 - TIE, digits=0)}; of such plans the simplest is taken"
    same = pinned.plan.tuning == taken.plan.tuning and pinned.plan.hardware == taken.plan.hardware
    if ratio < 1 and same and pinned.plan.model == taken.plan.model:
        enough = format_percent(1 / OFFLOADED - 1, digits=0)
        return f"fits and takes {ratio:.2f} × the time: offload is taken only where it gains {enough}"
    return f"fits and takes {ratio:.2f} × the time per token"


def _table(one: Priced, other: Priced) -> list[str]:
    a, b = one.estimate, other.estimate
    rows_of = [priced.plan.batch.global_batch_size * num_ranks(priced.plan) for priced in (one, other)]
    rows = [
        ("", "taken", "with it", "change"),
        _bytes("a device at its peak", a.peak_bytes, b.peak_bytes),
        _bytes("a node's host memory", a.host_bytes, b.host_bytes),
        _bytes("a node's NVMe", a.nvme_bytes, b.nvme_bytes),
        ("rows in a step", *(f"{count:,}" for count in rows_of), f"{rows_of[1] - rows_of[0]:+,}"),
        _bytes("sent in a step", a.communication_bytes, b.communication_bytes),
        _ratio("a step", a.step_seconds, b.step_seconds, format_seconds),
        _ratio("speed", a.tokens_per_second, b.tokens_per_second, format_rate),
    ]
    shown = [row for row in rows if row[1:3] != ("0 B", "0 B")]
    return [f"  {name:<22}{taken:>18}{pinned:>18}{change:>18}" for name, taken, pinned, change in shown]


def _bytes(name: str, taken: int, pinned: int) -> tuple[str, ...]:
    sign = "+" if pinned >= taken else "−"
    return name, format_bytes(taken), format_bytes(pinned), f"{sign}{format_bytes(abs(pinned - taken))}"


def _ratio(name: str, taken: float, pinned: float, words: Callable[[float], str]) -> tuple[str, ...]:
    return name, words(taken), words(pinned), f"× {pinned / taken:.2f}"


def alternative_data(alternative: Alternative) -> dict[str, Any]:
    """The object ``why`` of ``--json``."""
    taken, pinned = alternative.taken, alternative.pinned
    return {
        "change": alternative.change,
        "fits": pinned.estimate.fits,
        "taken": priced_data(taken),
        "pinned": priced_data(pinned),
    }


Quantity = Literal["seq_len", "micro_batch", "model"]
QUANTITIES: tuple[Quantity, ...] = ("seq_len", "micro_batch", "model")
MOST_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """``value``: tokens, rows or a model's name; None when nothing fits."""

    method: Method
    value: int | str | None

    @property
    def label(self) -> tuple[str, str, str]:
        """Method, base and precision in words."""
        return _label(self.method)


def largest(recipe: Recipe, quantity: str, *, model: ModelSpec, hardware: Hardware) -> tuple[Largest, ...]:
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
    found: dict[tuple[str, str, str], Largest] = {}
    for method in methods_for(request):
        one = MethodSearch(request, method, on_device=not offloads)
        if _label(method) not in found and one.placements:
            value = _value(quantity, one)
            found[_label(method)] = Largest(method=method, value=value)
    return tuple(found.values())


def _small(recipe: Recipe) -> Recipe:
    """One row at a time and nothing accumulated, where the recipe leaves that open."""
    pins = {
        "micro_batch_size": recipe.micro_batch_size or 1,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps or 1,
        "global_batch_size": None,
    }
    return recipe.model_copy(update=pins)


def _label(method: Method) -> tuple[str, str, str]:
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


def explain_largest(recipe: Recipe, quantity: str, found: tuple[Largest, ...]) -> str:
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
    for item in found:
        name, base, precision = item.label
        words = f"{name}, {precision}" + (f", {base}" if base else "")
        value = f"{item.value:,}" if isinstance(item.value, int) else item.value or "none fits"
        lines.append(f"  {words:<60}{value:>34}")
    return "\n".join(lines)


def largest_data(quantity: str, found: tuple[Largest, ...]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    keys = ("tuning", "base", "precision", "value")
    rows = [dict(zip(keys, (*item.label, item.value), strict=True)) for item in found]
    return {"largest": quantity, "methods": rows}
