"""Recipes that no plan can honour, refused with the rule and the settings that ask for it."""

from collections.abc import Iterator
from dataclasses import replace

from fitune.errors import FituneError, RecipeError
from fitune.planner.candidates import batches, draft
from fitune.planner.methods import methods
from fitune.planner.placements import every_placement
from fitune.spec.hardware import Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Plan
from fitune.spec.recipe import Recipe
from fitune.spec.recipe_rules import require_consistent
from fitune.spec.rules import Purpose, Rule, broken_rules


def refuse_contradictions(
    recipe: Recipe, *, model: ModelSpec, hardware: Hardware, purposes: tuple[Purpose, ...] = ("plan",)
) -> None:
    """Raises RecipeError or HardwareError when every plan that keeps the recipe's settings breaks a rule."""
    require_consistent(recipe, devices=hardware.num_gpus)
    nearest: tuple[Plan, tuple[Rule, ...]] | None = None
    for plan in _every_draft(recipe, model, hardware):
        broken = broken_rules(plan, *purposes)
        if not broken:
            return
        if nearest is None or len(broken) < len(nearest[1]):
            nearest = plan, broken
    if nearest is None:
        raise RecipeError("no way of training keeps all of these settings", hint="leave one of them open")
    raise _refusal(recipe, *nearest)


def _every_draft(recipe: Recipe, model: ModelSpec, hardware: Hardware) -> Iterator[Plan]:
    """Every plan that the settings leave open, whether or not it keeps the rules: the simplest first."""
    for method in methods(recipe, model=model, gpu=hardware.gpu):
        splits = batches(recipe, method, ranks=hardware.num_gpus)
        for placement in every_placement(recipe, hardware):
            plan = draft(recipe, method, placement, model=model, hardware=hardware)
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
