"""Keep every choice of the user, decide the rest: the best method that fits, and in it the best plan."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fitune.errors import FituneError, RecipeError
from fitune.estimate.predict import largest_batch, predict
from fitune.estimate.step import StepStages, describe_step
from fitune.planner.candidates import Method, Placement, Request, batches, draft, every_placement
from fitune.planner.decisions import decisions_of
from fitune.planner.defaults import price_of, with_cards
from fitune.planner.explain import memory_sum
from fitune.planner.fit import OFFLOADED, fits, host_fits, shortage, tokens_per_second
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods, methods_for
from fitune.recipe.contradictions import require_consistent
from fitune.recipe.recipe import Recipe
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Lora, Plan
from fitune.values.predictions import PlanReport, Priced, Rejection
from fitune.values.rules import Purpose, Rule, broken_rules, keeps_rules
from fitune.values.words import describe_method, describe_placement

RUNNERS_UP = 3


def find_plan(
    recipe: Recipe, *, model: ModelSpec, hardware: Hardware, purposes: tuple[Purpose, ...] = ("plan",)
) -> PlanReport:
    """The plan to run, three others, and why every better method was not taken.

    ``purposes``: what the plan is wanted for; all plans keep the rules that bind any of them.
    Raises RecipeError or HardwareError for pins that cannot be honoured, NothingFits when no plan that keeps
    them fits.
    """
    request = Request.of(recipe, model, hardware, purposes)
    refuse_contradictions(request)
    searched = list(search(request))
    fitting = [one for one in searched if one.found]
    rejected = _rejections(searched)
    taken = _taken(recipe, fitting)
    if taken is None:
        from fitune.planner.nothing_fits import nothing_fits  # advice: not for those whose plan fits

        smallest = [one.smallest for one in searched if one.smallest is not None]
        raise nothing_fits(request, smallest, rejected)
    chosen = _priced(saving_beside_steps(recipe, taken.found[0].plan))
    runners_up = tuple(_priced(found.plan) for found in _runners_up(taken, fitting))
    price = recipe.price_per_gpu_hour or price_of(hardware.gpu)
    return PlanReport(
        chosen=chosen,
        runners_up=runners_up,
        rejected=rejected,
        decisions=decisions_of(recipe, request, taken.method, chosen, runners_up, price_per_gpu_hour=price),
        price_per_gpu_hour=price,
        trained=_trained_instead(request, chosen.plan),
    )


def refuse_contradictions(request: Request) -> None:
    """Raises RecipeError or HardwareError when every plan that keeps the recipe's settings breaks a rule."""
    require_consistent(request.recipe, devices=request.hardware.num_gpus)
    nearest: tuple[Plan, tuple[Rule, ...]] | None = None
    for plan in _every_draft(request):
        broken = broken_rules(plan, *request.purposes)
        if not broken:
            return
        if nearest is None or len(broken) < len(nearest[1]):
            nearest = plan, broken
    if nearest is None:
        raise RecipeError("no plan keeps all of these settings", hint="leave one of them open")
    raise _refusal(request.recipe, *nearest)


def _every_draft(request: Request) -> Iterator[Plan]:
    """Every plan that the settings leave open, whether or not it keeps the rules: the simplest first."""
    for method in methods(request):
        splits = batches(request.recipe, method, ranks=request.hardware.num_gpus)
        for placement in every_placement(request):
            plan = draft(request, method, placement)
            yield from (replace(plan, batch=batch) for batch in {*splits[:1], *splits[-1:]})


def _refusal(recipe: Recipe, plan: Plan, broken: tuple[Rule, ...]) -> FituneError:
    """Error of the plan that comes nearest: ``LOMO updates … stage 3 (asked for: tuning: lomo, zero: 2)``."""
    lines = []
    for rule in broken:
        pins = (name for name in rule.settings if name in recipe.model_fields_set)
        settings = ", ".join(f"{name}: {str(getattr(recipe, name)).lower()}" for name in pins)
        lines.append(rule.why(plan) + (f" (asked for: {settings})" if settings else ""))
    hints = dict.fromkeys(rule.instead for rule in broken)
    return broken[0].error("; ".join(lines), hint="; ".join(hints))


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """One method: its plans that fit, the preferred first; or the smallest plan, which does not."""

    method: Method
    found: tuple[StepStages, ...]
    smallest: StepStages | None


def search(request: Request, *, taken_only: bool = False) -> Iterator[Searched]:
    """Methods in the order of preference, until one fits; then only those that train something else.

    ``taken_only``: of each method only the plan to take is looked for.
    """
    fitting: list[Method] = []
    for method in filter(request.wanted, methods_for(request)):
        if _is_settled(method, fitting):
            continue
        devices = _devices(request.recipe, request.hardware)
        searches = [MethodSearch(replace(request, hardware=some), method) for some in devices]
        searches = [one for one in searches if one.placements]
        if searches:
            searched = _searched(request.recipe, method, searches, taken_only=taken_only)
            fitting += [method] if searched.found else []
            yield searched


def first_choice(request: Request) -> Priced | None:
    """The plan that the report of ``find_plan`` takes, without the others; the smallest where none fits, None without
    any."""
    smallest: list[StepStages] = []

    def fitting() -> Iterator[Searched]:
        """Methods with plans that fit; ``smallest`` gets the smallest plan of each other method."""
        for one in search(request, taken_only=True):
            if one.smallest is not None:
                smallest.append(one.smallest)
            else:
                yield one

    taken = _taken(request.recipe, fitting())
    if taken is None:
        return _priced(min(smallest, key=shortage).plan) if smallest else None
    chosen = _priced(saving_beside_steps(request.recipe, taken.found[0].plan))
    return _trained_instead(request, chosen.plan) or chosen


def taken_on(recipe: Recipe, *, model: ModelSpec, hardware: Hardware) -> Priced | None:
    """The first choice there; None where nothing fits. Raises RecipeError or HardwareError for pins that cannot be
    honoured, as ``find_plan`` does."""
    request = Request.of(recipe, model, hardware, ("plan",))
    refuse_contradictions(request)
    chosen = first_choice(request)
    return chosen if chosen is not None and chosen.estimate.fits else None


FAST_ENOUGH = 0.5
"""A method that the recipe leaves open is taken if it has this share of the speed of the next one that fits."""


def _taken(recipe: Recipe, fitting: Iterable[Searched]) -> Searched | None:
    """Returns the method to take of those that fit, the better first; asks for no more of them than it needs.

    Where memory counts alone it is the first, however slow.
    """
    better: Searched | None = None
    for following in fitting:
        if better is not None:
            is_slow = _cost(better.found[0]) * FAST_ENOUGH > _cost(following.found[0])
            if recipe.objective == "least-memory" or not is_slow:
                break
        better = following
    return better


def _trained_instead(request: Request, plan: Plan) -> Priced | None:
    """The plan that training takes where it cannot run ``plan``; None where it can, or finds none that fits."""
    if keeps_rules(plan, "train"):
        return None
    found = first_choice(replace(request, purposes=(*request.purposes, "train")))
    return found if found is not None and found.estimate.fits else None


def _is_settled(method: Method, fitting: Sequence[Method]) -> bool:
    """After a method that fits only other kinds are looked at, and none that is a last resort."""
    known = {_kind(other) for other in fitting}
    return bool(known) and (method.last_resort or _kind(method) in known)


def _kind(method: Method) -> tuple[str, str]:
    base = type(method.tuning.base).__name__ if isinstance(method.tuning, Lora) else ""
    return type(method.tuning).__name__, base


def _searched(
    recipe: Recipe, method: Method, searches: Sequence[MethodSearch], *, taken_only: bool
) -> Searched:
    if recipe.objective == "least-memory":
        found = [step for one in searches if (step := one.smallest()) is not None and fits(step)]
        ranked = sorted(found, key=lambda step: predict(step.plan).peak_bytes)
    else:
        ranked = _best_first([one.fastest(taken_only=taken_only) for one in searches])
    if ranked:
        return Searched(method=method, found=tuple(ranked), smallest=None)
    smallest = [step for one in searches if (step := one.smallest()) is not None]
    return Searched(method=method, found=(), smallest=min(smallest, key=shortage))


def _best_first(found: Sequence[tuple[StepStages, ...]]) -> list[StepStages]:
    """The plan taken on each number of devices, the cheapest first, where offload has to gain a quarter here, too; then
    all others."""
    taken = sorted(
        (steps[0] for steps in found if steps),
        key=lambda step: _cost(step) / (1 if Placement.of(step.plan).is_plain else OFFLOADED),
    )
    others = sorted((step for steps in found for step in steps[1:]), key=_cost)
    return [*taken, *others]


def _cost(step: StepStages) -> float:
    """GPU-seconds per token: what is paid is proportional to it."""
    return step.plan.hardware.num_gpus / tokens_per_second(step)


def _devices(recipe: Recipe, hardware: Hardware) -> Iterator[Hardware]:
    """All devices; where money counts, also fewer of them."""
    yield hardware
    if recipe.objective != "cheapest":
        return
    nodes, gpus = hardware.nodes, hardware.gpus_per_node
    while nodes := nodes // 2:
        yield replace(hardware, nodes=nodes, internode_bandwidth=hardware.internode_bandwidth * (nodes > 1))
    while gpus := gpus // 2:
        yield with_cards(replace(hardware, nodes=1, internode_bandwidth=0.0), gpus, recipe)


def _rejections(searched: Sequence[Searched]) -> tuple[Rejection, ...]:
    """One a method; the same arithmetic is not told twice."""
    told: dict[str, Rejection] = {}
    for plan in (one.smallest.plan for one in searched if one.smallest is not None):
        what = ", ".join(filter(None, (describe_method(plan), describe_placement(plan))))
        why = memory_sum(predict(plan))
        told.setdefault(why, Rejection(what=what, why=why))
    return tuple(told.values())


def _runners_up(taken: Searched, fitting: Sequence[Searched]) -> list[StepStages]:
    """The best of every other method, then the chosen method in other placements, then with other batches."""
    chosen, *rest = taken.found
    placements = {Placement.of(chosen.plan)}
    otherwise: list[StepStages] = []
    batches: list[StepStages] = []
    for step in rest:
        placement = Placement.of(step.plan)
        (batches if placement in placements else otherwise).append(step)
        placements.add(placement)
    others = [one.found[0] for one in fitting if one is not taken]
    return [*others, *otherwise, *batches][:RUNNERS_UP]


def saving_beside_steps(recipe: Recipe, plan: Plan) -> Plan:
    """``plan``, which writes its checkpoints beside the steps where the recipe leaves that open, a GPU trains, and the
    host has room for the copy, as far as its memory is known."""
    if recipe.async_save is not None or not plan.run.saves or plan.hardware.gpu.is_cpu:
        return plan
    beside = replace(plan, run=replace(plan.run, async_save=True))
    return beside if host_fits(describe_step(beside, largest_batch(beside))) else plan


def _priced(plan: Plan) -> Priced:
    return Priced(plan=plan, estimate=predict(plan))
