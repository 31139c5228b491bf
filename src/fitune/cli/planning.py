"""``fitune plan``."""

import json as json_text

from fitune.measure.hardware import resolve_hardware
from fitune.planner.explain import explain_plan, plan_data
from fitune.planner.search import find_plan
from fitune.spec.hardware import Hardware
from fitune.spec.model_config import load_model_spec
from fitune.spec.recipe import Recipe
from fitune.spec.reports import PlanReport


def plan_for(recipe: Recipe) -> PlanReport:
    """What the recipe wants, on the hardware it names or else the hardware that is here."""
    return find_plan(recipe, model=load_model_spec(recipe.model), hardware=wanted_hardware(recipe))


def wanted_hardware(recipe: Recipe) -> Hardware:
    return resolve_hardware(
        gpu=recipe.gpu, gpus=recipe.gpus, nodes=recipe.nodes, host_memory_bytes=recipe.host_memory
    )


def print_plan(report: PlanReport, *, json: bool) -> None:
    print(json_text.dumps(plan_data(report), indent=2, ensure_ascii=False) if json else explain_plan(report))
