"""Beside the plan of a recipe: what a change of it would cost, and the largest that fits."""

from dataclasses import dataclass

from fitune.planner.alternatives import Alternative, Largest, changed_recipe, compare, largest
from fitune.session.planning import for_its_rows, plan_for, wanted_hardware
from fitune.spec.model.model_config import load_model_spec
from fitune.spec.predictions import PlanReport
from fitune.spec.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class WithChange:
    """The plan of a recipe, and beside it the best plan with a change."""

    report: PlanReport
    alternative: Alternative


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestThatFit:
    """The largest row, micro-batch or model of each method that the recipe leaves open."""

    recipe: Recipe
    quantity: str
    found: tuple[Largest, ...]


def plan_with(recipe: Recipe, change: str) -> WithChange:
    """The plan, and the best plan with the settings of ``zero: 3, backend: fsdp`` on top."""
    recipe = for_its_rows(recipe)
    changed = changed_recipe(recipe, change)
    report = plan_for(recipe)
    alternative = compare(
        changed, change, taken=report.chosen,
        model=load_model_spec(changed.model), hardware=wanted_hardware(changed),
    )  # fmt: skip
    return WithChange(report=report, alternative=alternative)


def largest_for(recipe: Recipe, quantity: str) -> LargestThatFit:
    """The largest ``seq_len``, ``micro_batch`` or ``model`` that fits. Raises RecipeError for another quantity."""
    recipe = for_its_rows(recipe)
    quantity = quantity.replace("-", "_").removesuffix("_size")
    found = largest(recipe, quantity, model=load_model_spec(recipe.model), hardware=wanted_hardware(recipe))
    return LargestThatFit(recipe=recipe, quantity=quantity, found=found)
