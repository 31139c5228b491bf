"""Built-in names are planned, or refused in a sentence of the planner's own; nothing is traced.

What a traced one is planned with is held by rehearse/test_shipped_profiles.py, for every config.
"""

import pytest

from fitune.errors import FituneError
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.values.model.known_models import known_model_names, names_with_formulas
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.tracer import trace_with
from plans import gpu

TRACED = sorted({*known_model_names()} - {*names_with_formulas()})


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        ([*TRACED[4::8], *names_with_formulas()[::20]], 4),  # machines that hold all of them
        pytest.param(names_with_formulas(), 1, marks=pytest.mark.weekly),
    ],
    ids=["some", "all with formulas"],
)
def test_a_name_is_planned_or_refused_in_a_sentence(names, nodes):
    trace_with(None)
    for name in names:
        recipe = parse_recipe({"model": name, "data": ["rows.jsonl"], "tuning": "adalomo"})
        refused = ""
        try:
            find_plan(recipe, model=load_model_spec(name), hardware=gpu("h100", gpus=8, nodes=nodes))
        except FituneError as error:
            refused = error.message
        assert "trace" not in refused, f"{name}: {refused}"
