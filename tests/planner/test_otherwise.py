"""What is said about other quality and fewer machines is what a search with those settings finds."""

from dataclasses import replace

import pytest

from fitune.planner.defaults import with_host_memory
from fitune.units import GIB, format_rate
from plans import gpu, lines_of, report_of


def full_on(hardware, settings=""):
    return report_of("llama-3.1-8b", with_host_memory(hardware), settings, tuning="full")


@pytest.mark.parametrize(
    ("model", "gpus", "lesser"),
    [
        ("llama-3.1-8b", 1, "precision: bf16"),
        ("llama-3.1-70b", 8, "precision: bf16 with optimizer: adamw-8bit"),
    ],
)
def test_lesser_quality_is_offered_with_its_factor_and_price_where_states_wait_on_the_host(
    model, gpus, lesser
):
    machine = gpu("h100", gpus=gpus, host_memory_bytes=gpus * 256 * GIB)
    report = report_of(model, machine, tuning="full")
    assert report.chosen.plan.offload.optimizer == "cpu"
    [note] = lines_of(report, "note on speed:")
    other = report_of(model, machine, lesser.replace(" with ", ", "), tuning="full").chosen
    assert other.plan.offload.optimizer == "device"
    ratio = other.estimate.tokens_per_second / report.chosen.estimate.tokens_per_second
    assert f"{lesser} is {ratio:.1f} × as fast ($" in note
    assert "rounds away updates under 1/256 of a weight" in note


def test_nothing_is_offered_that_was_asked_for_otherwise_or_gains_little():
    asked = full_on(gpu("h100"), "precision: bf16-master")
    for report in (asked, full_on(gpu("a100-80gb")), full_on(gpu("h100", gpus=8))):
        assert not lines_of(report, "note on speed:")


def test_machines_that_slow_each_other_down_are_said_with_the_speed_of_one():
    two = gpu("h100", gpus=8, nodes=2, internode_bandwidth=10e9 / 8)
    slow = full_on(two)
    assert lines_of(slow, "node_network: 10 Gbit/s between nodes, assumed")
    [note] = lines_of(slow, "note on nodes:")
    alone = full_on(gpu("h100", gpus=8)).chosen.estimate
    assert format_rate(alone.tokens_per_second) in note
    assert "10 Gbit/s" in note
    fast = replace(two, internode_bandwidth=400e9)
    named = full_on(fast, "global_batch_size: 256, node_network: 400GB/s")
    assert not lines_of(named, ("note on nodes:", "node_network:"))


def test_what_is_faster_is_so_on_the_devices_of_the_plan():
    """A million tokens cost least on one of the eight cards: more of them are no reason for another precision."""
    settings = "tuning: full, price_per_gpu_hour: 1"
    cheapest = report_of(
        "qwen2.5-14b", gpu("a100-40gb", gpus=8, host_memory_bytes=2000 * GIB), settings, objective="cheapest"
    )
    assert cheapest.chosen.plan.hardware.num_gpus == 1
    alone = report_of("qwen2.5-14b", cheapest.chosen.plan.hardware, settings)
    assert lines_of(cheapest, "note on speed:") == lines_of(alone, "note on speed:")


def test_an_offload_is_compared_on_the_devices_of_the_plan():
    """Two cards with an offload are twice as fast as one without, and no reason to offload."""
    settings = "tuning: lora, price_per_gpu_hour: 1"
    two = gpu("v100-32gb", gpus=2, host_memory_bytes=2000 * GIB)
    cheapest = report_of("llama-3.1-8b", two, settings, objective="cheapest")
    assert cheapest.chosen.plan.hardware.num_gpus == 1
    alone = report_of("llama-3.1-8b", cheapest.chosen.plan.hardware, settings)
    assert {*lines_of(cheapest, "offload: none")} <= {*lines_of(alone, "offload: none")}
