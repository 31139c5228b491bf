"""Every built-in name is planned, or refused in a sentence of the planner's own; nothing is traced."""

from fitune.errors import FituneError
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.values.model.known_models import known_model_names, names_with_formulas
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.tracer import trace_with
from plans import gpu


def test_every_name_is_planned_or_refused_in_a_sentence():
    """An eighth of those that are traced, and some of the others, on machines that hold all of them."""
    trace_with(None)
    traced = sorted({*known_model_names()} - {*names_with_formulas()})
    for name in [*traced[4::8], *names_with_formulas()[::20]]:
        recipe = parse_recipe({"model": name, "data": ["rows.jsonl"], "tuning": "adalomo"})
        refused = ""
        try:
            find_plan(recipe, model=load_model_spec(name), hardware=gpu("h100", gpus=8, nodes=4))
        except FituneError as error:
            refused = error.message
        assert "trace" not in refused, f"{name}: {refused}"
