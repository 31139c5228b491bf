"""The promise of the first page, held over 300 plans: of the ways of a method that fit, none listed is more than 3 %
faster than the one taken (25 % where it offloads and the one taken does not), and a method left open is the first that
fits and has half the speed of the next."""

from itertools import cycle, islice

import pytest

from fitune.errors import FituneError
from fitune.recipe.recipe import parse_recipe
from fitune.session.planning import plan_for
from fitune.values.model import tracer
from fitune.values.words import method_name
from golden.accounts import MACHINES, MODELS, WAYS

COUNT = 300
ALWAYS = 31  # shares no factor with the numbers of models, machines and ways: each of them has its turn
METHODS = ("full", "lora", "qlora")


def recipes():
    ways = islice(zip(cycle(MODELS), cycle(MACHINES), cycle(WAYS), strict=False), COUNT)
    for number, (model, machine, way) in enumerate(ways):
        rows = {"mean_row_tokens": 200} if number // 6 % 2 else {}
        yield {"model": model, **machine, **way, **rows, "data": ["rows.jsonl"]}


@pytest.fixture(autouse=True)
def _nothing_is_traced():
    tracer.trace_with(None)


def speed(priced):
    return priced.estimate.tokens_per_second


def stays_on_devices(priced):
    offload = priced.plan.offload
    return (offload.parameters, offload.optimizer, offload.activations) == ("device",) * 3


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, id=str(number), marks=[pytest.mark.slow] if number % ALWAYS else [])
        for number, each in enumerate(recipes())
    ],
)
def test_nothing_listed_is_faster(settings):
    try:
        report = plan_for(parse_recipe(settings))
    except FituneError:
        return
    own, stays = method_name(report.chosen.plan.tuning), stays_on_devices(report.chosen)
    for other in report.runners_up:
        name = method_name(other.plan.tuning)
        if name == own:
            least = 0.8 if stays and not stays_on_devices(other) else 0.97
            assert speed(report.chosen) >= least * speed(other) * 0.999999
        elif {name, own} <= set(METHODS) and "tuning" not in settings:
            is_next = METHODS.index(name) == METHODS.index(own) + 1
            assert not is_next or speed(report.chosen) >= speed(other) / 2
