"""What is said about other quality and fewer machines is what a search with those settings finds."""

from dataclasses import replace

from fitune.planner.defaults import with_host_memory
from fitune.planner.search import find_plan
from fitune.spec.recipe.recipe import parse_recipe
from fitune.units import format_rate
from plans import gpu, known


def plan_of(hardware, **settings):
    recipe = parse_recipe({"model": "meta-llama/Llama-3.1-8B", "tuning": "full", **settings})
    return find_plan(recipe, model=known("llama-3.1-8b"), hardware=with_host_memory(hardware))


def notes_of(report, about):
    return [line for line in report.decisions if line.startswith(f"note on {about}:")]


def test_lesser_quality_is_offered_with_its_factor_and_price_where_states_wait_on_the_host():
    report = plan_of(gpu("h100"))
    assert report.chosen.plan.offload.optimizer == "cpu"
    [note] = notes_of(report, "speed")
    other = plan_of(gpu("h100"), precision="bf16", optimizer="adamw-8bit").chosen
    assert other.plan.offload.optimizer == "device"
    ratio = other.estimate.tokens_per_second / report.chosen.estimate.tokens_per_second
    assert f"precision: bf16 with optimizer: adamw-8bit is {ratio:.1f} × as fast ($" in note
    assert "rounds away updates under 1/256 of a weight" in note


def test_nothing_is_offered_that_was_asked_for_otherwise_or_gains_little():
    assert not notes_of(plan_of(gpu("h100"), precision="bf16-master"), "speed")
    assert not notes_of(plan_of(gpu("a100-80gb")), "speed")
    assert not notes_of(plan_of(gpu("h100", gpus=8)), "speed")


def test_machines_that_slow_each_other_down_are_said_with_the_speed_of_one():
    two = replace(gpu("h100", gpus=8), nodes=2, internode_bandwidth=10e9 / 8)
    [note] = notes_of(plan_of(two), "nodes")
    alone = plan_of(gpu("h100", gpus=8)).chosen.estimate
    assert format_rate(alone.tokens_per_second) in note
    assert "10 Gbit/s" in note
    fast = replace(two, internode_bandwidth=400e9)
    assert not notes_of(plan_of(fast, global_batch_size=256), "nodes")
