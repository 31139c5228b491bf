"""What another choice would cost: the plan with some settings pinned, beside the plan that was taken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fitune.errors import RecipeError
from fitune.estimate.predict import predict
from fitune.estimate.shares import num_ranks
from fitune.planner.added_tokens import with_added_rows
from fitune.planner.defaults import with_usual_row
from fitune.planner.describe import memory_sum, wrapped
from fitune.planner.explain import estimate_data
from fitune.planner.methods import Method
from fitune.planner.nothing_fits import shortage
from fitune.planner.refusals import refuse_contradictions
from fitune.planner.search import search
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Plan
from fitune.spec.recipe import Recipe, canonical_keys, parse_recipe
from fitune.spec.recipe_yaml import parse_value
from fitune.spec.reports import Estimate, Priced
from fitune.spec.serial import to_data
from fitune.spec.words import describe_plan, method_name
from fitune.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """``taken`` is the plan of the recipe, ``pinned`` the best with the change; it may not fit."""

    change: str
    taken: Priced
    pinned: Priced


def changed_recipe(recipe: Recipe, change: str) -> Recipe:
    """The recipe with the settings of ``zero: 3, backend: fsdp`` on top. Raises RecipeError as a recipe would."""
    if not any(mark in change for mark in ":="):
        raise RecipeError(
            f"{change!r} is no change: it sets nothing",
            hint='settings as in a recipe: "zero: 3, backend: fsdp"',
        )
    text = change if change.lstrip().startswith("{") else "{" + change.replace("=", ": ") + "}"
    wanted = parse_value(text, where="--why")
    if not isinstance(wanted, dict) or not wanted or None in wanted.values():
        raise RecipeError("--why names no setting", hint='--why "zero: 3"')
    given = recipe.model_dump(include=recipe.model_fields_set)
    return parse_recipe({**given, **canonical_keys(wanted, where="--why")}, where="--why")


def compare(
    changed: Recipe, change: str, *, taken: Priced, model: ModelSpec, hardware: Hardware
) -> Alternative:
    """Search with the change and the same method; when nothing fits, the smallest plan stands for it."""
    model = with_added_rows(changed, model)
    changed = with_usual_row(changed, model)
    refuse_contradictions(changed, model=model, hardware=hardware)
    answers = search(changed, model=model, hardware=hardware, wanted=_like(taken.plan, changed))
    fitting = [answer.found[0].plan for answer in answers if answer.found]
    if fitting:
        plan = fitting[0]
    else:
        smallest = [answer.smallest for answer in answers if answer.smallest is not None]
        if not smallest:
            raise RecipeError(f"{change}: no plan of this recipe can have that", hint="fewer pins")
        plan = min(smallest, key=shortage).plan
    return Alternative(change=change, taken=taken, pinned=Priced(plan=plan, estimate=predict(plan)))


def _like(plan: Plan, changed: Recipe) -> Callable[[Method], bool]:
    """Methods with the plan's own tuning, unless the change is about the method."""
    open_method = changed.tuning is None and not changed.quantization_is_asked_for

    def is_like(method: Method) -> bool:
        same = method_name(method.tuning) == method_name(plan.tuning)
        return not open_method or (same and changed.precision in (None, method.precision.value))

    return is_like


def explain_alternative(alternative: Alternative) -> str:
    """Both plans, then what changes, in bytes and seconds."""
    taken, pinned = alternative.taken, alternative.pinned
    lines = ["taken", wrapped(describe_plan(taken.plan)), f"with {alternative.change}"]
    if pinned.plan == taken.plan:
        return "\n".join([*lines, wrapped("the same plan: that is what was taken")])
    lines += [wrapped(describe_plan(pinned.plan)), "", *_table(taken, pinned), ""]
    return "\n".join([*lines, wrapped(_verdict(pinned, taken))])


def _verdict(pinned: Priced, taken: Priced) -> str:
    if not pinned.estimate.fits:
        return f"does not fit: {memory_sum(pinned.estimate)}"
    ratio = _seconds_per_token(pinned.estimate) / _seconds_per_token(taken.estimate)
    if pinned.plan.tuning == taken.plan.tuning and 0.95 < ratio < 1.05:
        return "fits and is as fast within 5 %: of such plans the simplest is taken"
    same = pinned.plan.tuning == taken.plan.tuning and pinned.plan.hardware == taken.plan.hardware
    if ratio < 1 and same and pinned.plan.model == taken.plan.model:
        return (
            f"fits and takes {ratio:.2f} × the time: offloading has to be worth a quarter more speed, any other "
            "moving part 5 %"
        )
    return f"fits and takes {ratio:.2f} × the time per token"


def _seconds_per_token(estimate: Estimate) -> float:
    return 1 / estimate.tokens_per_second


def _table(one: Priced, other: Priced) -> list[str]:
    taken, pinned = one.estimate, other.estimate
    rows = [
        ("a device at its peak", *_bytes(taken.peak_bytes, pinned.peak_bytes)),
        ("a node's host memory", *_bytes(taken.host_bytes, pinned.host_bytes)),
        ("a node's NVMe", *_bytes(taken.nvme_bytes, pinned.nvme_bytes)),
        ("rows in a step", *_counts(_rows(one), _rows(other))),
        ("sent in a step", *_bytes(taken.communication_bytes, pinned.communication_bytes)),
        (
            "a step",
            format_seconds(taken.step_seconds),
            format_seconds(pinned.step_seconds),
            f"× {pinned.step_seconds / taken.step_seconds:.2f}",
        ),
        (
            "speed",
            format_rate(taken.tokens_per_second),
            format_rate(pinned.tokens_per_second),
            f"× {pinned.tokens_per_second / taken.tokens_per_second:.2f}",
        ),
    ]
    shown = [row for row in rows if row[1:3] != ("0 B", "0 B")]
    header = ("", "taken", "with it", "change")
    return [f"  {name:<22}{a:>18}{b:>18}{c:>18}" for name, a, b, c in (header, *shown)]


def _rows(priced: Priced) -> int:
    return priced.plan.batch.global_batch_size * num_ranks(priced.plan)


def _counts(taken: int, pinned: int) -> tuple[str, str, str]:
    return f"{taken:,}", f"{pinned:,}", f"{pinned - taken:+,}"


def _bytes(taken: int, pinned: int) -> tuple[str, str, str]:
    difference = pinned - taken
    sign = "+" if difference >= 0 else "−"
    return format_bytes(taken), format_bytes(pinned), f"{sign}{format_bytes(abs(difference))}"


def alternative_data(alternative: Alternative) -> dict[str, Any]:
    """The object ``why`` of ``--json``."""
    return {
        "change": alternative.change,
        "fits": alternative.pinned.estimate.fits,
        "taken": _side(alternative.taken.plan, alternative.taken.estimate),
        "pinned": _side(alternative.pinned.plan, alternative.pinned.estimate),
    }


def _side(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    return {"summary": describe_plan(plan), "plan": to_data(plan), "estimate": estimate_data(estimate)}
