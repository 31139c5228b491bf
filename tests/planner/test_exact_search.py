"""The search is exact: nothing that trying every plan finds is better than what it takes."""

from dataclasses import replace
from itertools import product

import pytest

from fitune.estimate.predict import predict
from fitune.planner.candidates import Request, block_counts, draft, losses
from fitune.planner.fit import INDISTINGUISHABLE, TIE
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods
from fitune.spec.plan import Recompute, Zero
from fitune.spec.recipe.recipe import parse_recipe
from fitune.units import GIB
from plans import gpu, known, recipe_of

SHALLOW = replace(known("qwen3-0.6b"), num_layers=7)


def every_plan(request, method):
    search = MethodSearch(request, method)
    counts = block_counts(request.recipe, layers=request.model.num_layers)
    ways = product(search.placements, search.batches, losses(request.recipe), counts)
    for placement, batch, loss, blocks in ways:
        plan = draft(request, method, placement)
        yield replace(plan, batch=batch, loss=loss, recompute=Recompute(blocks=blocks))


@pytest.mark.parametrize(
    ("card", "gpus", "host", "settings"),
    [
        ("rtx-3080", 1, 64, {"tuning": "full", "global_batch_size": 16}),
        ("rtx-3080", 1, 9, {"tuning": "full", "global_batch_size": 4, "seq_len": 8192}),
        (
            "rtx-3080",
            2,
            64,
            {"tuning": "full", "global_batch_size": 8, "loss_chunk_tokens": 256, "seq_len": 8192},
        ),
        ("t4", 4, 64, {"tuning": "lora", "global_batch_size": 16, "seq_len": 8192, "loss": "chunked"}),
        ("t4", 4, 64, {"tuning": "lora", "global_batch_size": 16, "seq_len": 8192, "mean_row_tokens": 300}),
        ("rtx-3080", 2, 64, {"tuning": "full", "global_batch_size": 8, "mean_row_tokens": 100}),
    ],
)
def test_no_plan_is_better_than_the_one_taken(card, gpus, host, settings):
    model = SHALLOW
    hardware = replace(gpu(card, gpus=gpus), host_memory_bytes=host * GIB)
    recipe = parse_recipe({"model": "qwen3-0.6b", "seq_len": 2048, **settings})
    request = Request(recipe=recipe, model=model, hardware=hardware)
    method = methods(request)[0]
    fitting = [e for plan in every_plan(request, method) if (e := predict(plan)).fits]
    found = MethodSearch(request, method).fastest()
    assert bool(found) == bool(fitting)
    if fitting:
        best = max(estimate.tokens_per_second for estimate in fitting)
        assert found[0].tokens_per_second >= INDISTINGUISHABLE * TIE * best
        assert max(item.tokens_per_second for item in found) >= INDISTINGUISHABLE * best


def test_the_smallest_plan_is_the_smallest():
    model, hardware = SHALLOW, replace(gpu("t4", gpus=2), host_memory_bytes=32 * GIB)
    recipe = recipe_of("qwen3-0.6b", tuning="full", global_batch_size=4, loss_chunk_tokens=256)
    request = Request(recipe=recipe, model=model, hardware=hardware)
    method = methods(request)[0]
    estimates = [predict(plan) for plan in every_plan(request, method)]
    on_host = [
        e.peak_bytes for e in estimates if e.host_bytes <= e.usable_host_bytes or not e.usable_host_bytes
    ]
    smallest = MethodSearch(request, method).smallest()
    assert predict(smallest.plan).peak_bytes == min(on_host)


def test_the_stages_of_a_model_do_not_depend_on_the_placement():
    """The search describes them once for all placements."""
    model, hardware = known("llama-3.2-1b"), gpu("a100-40gb", gpus=4)
    for tuning in ("full", "lora", "qlora", "lomo"):
        recipe = recipe_of("llama-3.2-1b", tuning=tuning, global_batch_size=8)
        request = Request(recipe=recipe, model=model, hardware=hardware)
        method = methods(request)[-1]
        search = MethodSearch(request, method)
        for placement in search.placements:
            for batch in search.batches:
                step = search.describe(placement, batch)
                assert search._peak(step) == predict(step.plan).peak_bytes


def test_fewer_devices_are_considered_where_money_counts():
    from fitune.planner.search import find_plan

    model, hardware = SHALLOW, gpu("rtx-4090", gpus=4)
    settings = {"model": "qwen3-0.6b", "tuning": "lora", "seq_len": 512}
    fastest = find_plan(parse_recipe(settings), model=model, hardware=hardware).chosen
    cheapest = find_plan(
        parse_recipe({**settings, "objective": "cheapest"}), model=model, hardware=hardware
    ).chosen
    assert fastest.plan.hardware.num_gpus == 4

    def cost(priced):
        return priced.plan.hardware.num_gpus / priced.estimate.tokens_per_second

    assert cost(cheapest) <= cost(fastest)


def test_least_memory_is_an_objective():
    from fitune.planner.search import find_plan

    model, hardware = known("llama-3.2-1b"), replace(gpu("a100-40gb", gpus=4), host_memory_bytes=256 * GIB)
    settings = {"model": "llama-3.2-1b", "tuning": "full"}
    usual = find_plan(parse_recipe(settings), model=model, hardware=hardware).chosen
    least = find_plan(
        parse_recipe({**settings, "objective": "least-memory"}), model=model, hardware=hardware
    ).chosen
    assert least.estimate.peak_bytes < usual.estimate.peak_bytes
    assert least.plan.sharding.stage == 3
    assert isinstance(least.plan.sharding, Zero)
