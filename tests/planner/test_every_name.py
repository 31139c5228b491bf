"""Every built-in name is planned, or refused in a sentence of the planner's own; nothing is traced.

The methods take the names by turns: the first every fifth name from the first on, the next from the second on.
"""

import pytest

from fitune.errors import FituneError
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.values.model.known_models import known_model_names, names_with_formulas
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.tracer import trace_with
from plans import gpu

CLUSTER = gpu("h100", gpus=8)
METHODS = (None, "full", "lora", "qlora", "adalomo")
QUICK = "adalomo"


@pytest.fixture(autouse=True)
def _untraced():
    trace_with(None)


def outcome(name, tuning):
    """ "" for a plan, else the refusal."""
    recipe = parse_recipe({"model": name, "data": ["rows.jsonl"], **({"tuning": tuning} if tuning else {})})
    try:
        find_plan(recipe, model=load_model_spec(name), hardware=CLUSTER)
    except FituneError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "tuning",
    [QUICK, *(pytest.param(tuning, marks=pytest.mark.slow) for tuning in METHODS if tuning != QUICK)],
)
def test_every_name_is_planned_or_refused_in_a_sentence(tuning):
    names = known_model_names()
    traced = sorted(set(names) - set(names_with_formulas()))
    for name in [*traced, *names_with_formulas()[::20]][METHODS.index(tuning) :: len(METHODS)]:
        refused = outcome(name, tuning)
        assert "trace" not in refused, f"{name}: {refused}"
