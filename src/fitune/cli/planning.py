"""``fitune plan``."""

import json as json_text
from dataclasses import replace

from fitune.measure.hardware import resolve_hardware
from fitune.planner.defaults import with_host_memory
from fitune.planner.explain import explain_plan, plan_data
from fitune.planner.largest import explain_largest, largest, largest_data
from fitune.planner.search import find_plan
from fitune.planner.why import alternative_data, changed_recipe, compare, explain_alternative
from fitune.spec.hardware import Hardware
from fitune.spec.model_config import load_model_spec
from fitune.spec.recipe import Recipe
from fitune.spec.reports import PlanReport
from fitune.spec.rules import Purpose


def plan_for(recipe: Recipe, *, purposes: tuple[Purpose, ...] = ("plan",)) -> PlanReport:
    """What the recipe wants, on the hardware it names or else the hardware that is here."""
    model = load_model_spec(recipe.model)
    return find_plan(recipe, model=model, hardware=wanted_hardware(recipe), purposes=purposes)


def wanted_hardware(recipe: Recipe) -> Hardware:
    found = resolve_hardware(
        gpu=recipe.gpu, gpus=recipe.gpus, nodes=recipe.nodes, host_memory_bytes=recipe.host_memory
    )
    found = with_host_memory(found)
    return found if recipe.nvme_size is None else replace(found, nvme_bytes=recipe.nvme_size)


def print_plan(report: PlanReport, *, json: bool) -> None:
    print(json_text.dumps(plan_data(report), indent=2, ensure_ascii=False) if json else explain_plan(report))


def print_alternative(recipe: Recipe, change: str, *, json: bool) -> None:
    """``--why``: the plan, and beside it the best plan with the change."""
    changed = changed_recipe(recipe, change)
    report = plan_for(recipe)
    alternative = compare(
        changed, change, taken=report.chosen,
        model=load_model_spec(changed.model), hardware=wanted_hardware(changed),
    )  # fmt: skip
    if json:
        data = {**plan_data(report), "why": alternative_data(alternative)}
        print(json_text.dumps(data, indent=2, ensure_ascii=False))
    else:
        print(explain_alternative(alternative))


def print_largest(recipe: Recipe, quantity: str, *, json: bool) -> None:
    """``--largest``."""
    quantity = quantity.replace("-", "_").removesuffix("_size")
    found = largest(recipe, quantity, model=load_model_spec(recipe.model), hardware=wanted_hardware(recipe))
    if json:
        print(json_text.dumps(largest_data(quantity, found), indent=2, ensure_ascii=False))
    else:
        print(explain_largest(recipe, quantity, found))
