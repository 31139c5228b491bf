"""Choosing a cluster: the order, its reasons, what is wanted of it, and fleet files that cannot be used."""

import re
from dataclasses import replace
from threading import Thread

import pytest

from fitune.errors import FituneError, NothingFits, RecipeError
from fitune.estimate.overhead import checkpoint_bytes
from fitune.estimate.predict import largest_batch, predict_step_time
from fitune.planner.clusters.fleet import (
    hardware_of,
    job_seconds,
    node_counts,
    number_of_saves,
    offers_on,
    rank_fleet,
)
from fitune.planner.clusters.fleet import ranked as rank_offers
from fitune.planner.clusters.ranking import Wanted
from fitune.planner.clusters.training_ranking import TOKENS_PER_SECOND
from fitune.planner.job import shm_bytes_of
from fitune.recipe.fleet import Cluster, read_fleet
from fitune.units import GIB
from fitune.values.counts import count_parameters
from fitune.values.plan import Ddp
from fitune.values.predictions import Epoch
from plans import known, recipe_of

CLUSTERS = """
clusters:
  - {name: hopper, gpu: H100, gpus: 8, nodes: 2, free: 1, wait: 1h, price: 3.0, host_memory: 1800GiB, storage: 2GB/s}
  - {name: volta, gpu: v100-32gb, gpus: 8, price: 1.2, start: 10s, kind: slurm}
  - {name: desk, gpu: rtx-4090, gpus: 2, price: 0.35, kind: slurm}
"""
ROWS = 20_000


def fleet_of(folder, text=CLUSTERS):
    (folder / "fleet.yaml").write_text(text)
    return read_fleet(folder / "fleet.yaml")


def epoch_of(plan):
    length = plan.batch.seq_len
    usual = largest_batch(plan)
    return Epoch(rows=ROWS, tokens=ROWS * length, longest_row=length, units=ROWS, usual=usual)


LLAMA_8B = recipe_of("meta-llama/Llama-3.1-8B", "tuning: lora, packing: true")


def ranking_of(folder, text, recipe=LLAMA_8B, **wanted):
    return rank_fleet(
        recipe, fleet_of(folder, text), Wanted(**wanted), model=known(recipe.model), epoch_of=epoch_of
    )


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """The ranking of CLUSTERS by what is wanted; they are planned once."""
    fleet, model = fleet_of(tmp_path_factory.mktemp("fleet")), known(LLAMA_8B.model)
    found, without = offers_on(fleet, LLAMA_8B, model=model, epoch_of=epoch_of, fetches_model=True)
    return lambda **wanted: rank_offers(LLAMA_8B, model, found, without, Wanted(**wanted))


def names(offers):
    return [(offer.cluster.name, offer.nodes) for offer in offers]


def test_the_fastest_comes_first_and_its_time_adds_up(ranked):
    """By hand: steps · seconds of a step, 16 GB of weights at 2 GB/s, tokens by one core, 24 $ an hour and node."""
    ranking = ranked()
    assert names(ranking.offers) == [("hopper", 2), ("hopper", 1), ("volta", 1), ("desk", 1)]
    best = ranking.best
    plan = best.priced.plan
    steps = -(-ROWS // (plan.batch.global_batch_size * plan.hardware.num_gpus))
    assert best.parts["training"] == pytest.approx(steps * predict_step_time(plan).step_seconds)
    weights = best.parts["weights"]
    assert weights == 2 * count_parameters(plan.model).total / 2e9 == pytest.approx(8.03, abs=0.01)
    assert best.parts["tokenising"] == ROWS * 2048 / TOKENS_PER_SECOND
    assert best.parts["start"] == 180
    assert ranking.offers[2].parts["start"] == 10
    assert best.cost == pytest.approx(sum(best.parts.values()) / 3600 * 16 * 3.0)


def test_objectives_order_by_what_they_name(ranked):
    cheapest, soonest = ranked(objective="cheapest"), ranked(objective="soonest")
    costs = [offer.cost for offer in cheapest.offers]
    assert costs == sorted(costs)
    assert cheapest.best.cluster.name == "desk"
    ends = [offer.end_seconds for offer in soonest.offers]
    assert ends == sorted(ends)
    assert names(soonest.offers)[0] == ("hopper", 1)  # the second node is taken for another hour
    assert next(offer for offer in soonest.offers if offer.nodes == 2).wait_seconds == 3600


def test_nothing_beats_the_frontier_in_both(ranked):
    ranking = ranked()
    for one in ranking.offers:
        beaten = any(each.seconds < one.seconds and each.cost < one.cost for each in ranking.offers)
        assert (one in ranking.frontier) is not beaten


def test_deadline_and_budget_leave_offers_out_and_say_why(ranked):
    all_of_them = ranked()
    volta = all_of_them.offers[2]
    in_time = ranked(objective="cheapest", deadline_seconds=volta.seconds - 1)
    assert next(why for offer, why in in_time.refused if offer.cluster.name == "volta").startswith("ends in")
    assert in_time.best.cluster.name == "hopper"
    cheap = ranked(budget=all_of_them.offers[1].cost)
    assert ("hopper", 2) not in names(cheap.offers)
    assert "costs $" in dict((offer.nodes, why) for offer, why in cheap.refused)[2]


def test_what_nothing_keeps_is_said_of_the_nearest(ranked):
    """A deadline names the fastest, a budget the cheapest, both together the nearest to each."""
    fast, cheap = ranked().best.cluster.name, ranked(objective="cheapest").best
    name, cost = cheap.cluster.name, cheap.cost
    for wanted, *said in (
        ({"deadline_seconds": 60.0}, f"none is in time; the fastest is {fast}, 1 node: ends in"),
        ({"budget": 0.01}, f"none is within the budget; the cheapest is {name}, 1 node: costs ${cost:,.2f}"),
        ({"deadline_seconds": cheap.seconds / 2, "budget": cost}, "the cheapest in time is hopper, 1 node: costs",
         f"the fastest within the budget is {name}, 1 node: ends in"),
    ):  # fmt: skip
        with pytest.raises(NothingFits) as caught:
            ranked(**wanted)
        _, *lines = caught.value.message.splitlines()
        assert [line.strip().startswith(start) for line, start in zip(lines, said, strict=True)] == [
            True
        ] * len(said)


def test_the_text_says_what_is_taken_and_why_not_the_others(ranked):
    text = " ".join(ranked().text().split())
    for words in (
        "volta, 1 node: the whole job takes", "8 devices instead of 16, each with", "(no bf16",
        "node_network 100 Gbit/s: hopper", "host_memory twice the node's device memory: volta, desk",
    ):  # fmt: skip
        assert words in text
    data = ranked().data()
    assert [offer["cluster"] for offer in data["offers"]] == ["hopper", "hopper", "volta", "desk"]
    first = data["offers"][0]
    assert (first["parts"]["start"], first["run"]["rows"]) == (180, ROWS)


def test_a_better_method_is_not_given_up_for_speed(tmp_path):
    """Full fine-tuning of 1 B parameters fits one card and not the other: the slow one comes first."""
    text = """
clusters:
  - {name: small, gpu: rtx-3080, gpus: 1, host_memory: 12GiB, price: 0.1}
  - {name: large, gpu: v100-32gb, gpus: 1, host_memory: 64GiB, price: 9}
"""
    ranking = ranking_of(tmp_path, text, recipe_of("llama-3.2-1b"), objective="cheapest")
    assert names(ranking.offers) == [("large", 1), ("small", 1)]
    assert "lora is what to train there, and full comes before it" in " ".join(ranking.text().split())


def test_what_fits_nowhere_says_why_of_each(tmp_path):
    text = """
clusters:
  - {name: one, gpu: t4, gpus: 1, host_memory: 16GiB}
  - {name: two, gpu: rtx-4090, gpus: 1, host_memory: 8TiB, disk: 20GiB}
  - {name: few, gpu: rtx-4090, gpus: 1, nodes: 8, host_memory: 16GiB, disk: 20GiB}
"""
    with pytest.raises(NothingFits) as found:
        ranking_of(tmp_path, text, recipe_of("meta-llama/Llama-3.1-70B", "tuning: qlora, packing: true"))
    said = found.value.message
    assert "one: does not fit: " in said
    assert "two: needs 143.00 GiB of disk on each node for caches, which have 20.00 GiB" in said
    few = next(line for line in said.splitlines() if line.startswith("  few: "))
    assert "few: 1 node: does not fit: " in few
    assert re.search(r"; [248] nodes: needs 143.00 GiB of disk", few)


def test_the_memory_that_a_job_asks_for_is_there(tmp_path):
    """Jobs ask for whole GiB, /dev/shm among them: 60.5 GiB are 60 to a plan, and a host that it takes up is small and
    not unknown. Eight processes are more than 8 GiB. A job of Kubernetes has one node."""
    node = Cluster(name="a", gpu="t4", gpus=2, host_memory=60 * GIB + GIB // 2)
    assert hardware_of(node, 1).host_memory_bytes + shm_bytes_of(2) == 60 * GIB
    for host in (shm_bytes_of(2), None):
        there = hardware_of(node.model_copy(update={"host_memory": host}), 1)
        assert (there.host_memory_bytes < GIB) == (host is not None)
    clusters = "{name: a, gpu: t4, gpus: 8, host_memory: 8GiB}, {name: b, gpu: t4, gpus: 8, nodes: 4, kind: kubernetes}"
    text = f"clusters: [{clusters}]"
    ranking = ranking_of(tmp_path, text, recipe_of("gpt2", "tuning: lora"))
    assert names(ranking.offers) == [("b", 1)]
    assert "GiB of host memory, and a node has 8.00 GiB" in dict(ranking.without)["a"]


def test_numbers_of_nodes_that_are_planned():
    assert [*map(node_counts, (1, 6, 8))] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clusters: []", "no cluster is listed"),
        ("{}", "no cluster is listed"),
        ("clusters: {a: {gpu: h100}}", "clusters is no list\n  try: clusters: [{name: a, gpu: h100"),
        ("", "a fleet is a list of `key: value` lines, and this file is empty"),
        ("cluster: []", "unknown key 'cluster'\n  try: did you mean 'clusters'?"),
        ("clusters: [3]", "cluster 1 is 3"),
        ("clusters: [{gpu: h100}]", "cluster 1: name is missing"),
        ("clusters: [{name: a, gpu: h100}, {name: a, gpu: l4}]", "two clusters are called 'a'"),
        ('clusters: [{name: "a\\nb", gpu: h100}]', "must be one line"),
    ],
)
def test_fleet_files_that_cannot_be_used(tmp_path, text, words):
    with pytest.raises(RecipeError) as refused:
        fleet_of(tmp_path, text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "words", "hint"),
    [
        ("gpus: 8", "gpu is missing", "gpu: h100 (80GB lists cards of its size)"),
        ("gpu: h1000", "gpu = 'h1000'", "did you mean 'h100'? gpu: 24GB lists the cards of that size"),
        ("gpu: v100", "gpu = 'v100'", "gpu: one of v100-16gb"),
        ("gpu: 2xA100-80GB", "gpu = '2xA100-80GB'", "gpu: a100-80gb, gpus: 2"),
        ("gpu: h100, price: -1", "price = -1", "price: 2.50"),
        ("gpu: h100, kind: mesos", "kind = 'mesos': ", "kind: kuberay, kubernetes or slurm"),
        ("gpu: h100, prise: 3", "unknown key 'prise'; did you mean 'price'?", "settings are name, gpu, "),
        ("gpu: h100, gpus: 0", "gpus = 0: must be greater than 0", "gpus: 8 (in each node)"),
        ("gpu: h100, nodes: two", "nodes = 'two': expected a number, found 'two'", "nodes: 2"),
        ("gpu: h100, nodes: 0", "nodes is 0", "free: 0 where all of them are taken now"),
        ("gpu: h100, nodes: 2, free: 5", "free = 5, more than its nodes = 2", "nodes: 5, or free: 2"),
        ("gpu: dgx-spark, gpus: 2, nodes: 3", "a dgx-spark is alone in its machine", "gpus: 1, nodes: 6"),
        ("gpu: h100, wait: soon", "wait = 'soon': ", "wait: 2h"),
        ("gpu: h100, host_memory: 512", "host_memory = 512: ", "host_memory: 1800GiB"),
        ("gpu: h100, job: {quue: x}", "unknown key 'quue'; did you mean 'queue'?", "settings are name, image, "),
        ("gpu: h100, kind: slurm, job: {image: x}", "job.image has no meaning with kind: slurm",
         "leave it out, or kind: kuberay"),
        ("gpu: h100, job: {queue: GPUs}", "job.queue = 'GPUs': is no name of", ""),
        ("gpu: h100, job: {extra_resources: {nvidia.com/gpu: 3}}", "is the plan's", ""),
        ("gpu: h100, job: {extra_resources: {memory: 3}}", "is no device", ""),
    ],
)  # fmt: skip
def test_a_wrong_key_of_a_cluster_says_where_it_stands_and_how_it_is_written(tmp_path, keys, words, hint):
    """In words of the file: a card is not to be given by options."""
    with pytest.raises(FituneError) as refused:
        fleet_of(tmp_path, f"clusters: [{{name: a, {keys}}}]")
    assert f"{tmp_path}/fleet.yaml: " in refused.value.message
    assert "cluster a: " in refused.value.message
    assert words in refused.value.message
    said = refused.value.hint or ""
    assert said.startswith(hint)
    assert "--" not in said


def test_nodes_that_nobody_says_when_are_free_are_not_waited_for(tmp_path):
    text = "clusters: [{name: a, gpu: t4, free: 0}]"
    with pytest.raises(NothingFits, match="does not say when") as caught:
        ranking_of(tmp_path, text, recipe_of("gpt2", "tuning: lora"), objective="soonest")
    assert caught.value.hint == "wait: in the fleet file, or --objective fastest"


def test_prices_are_asked_for_only_where_costs_are_compared(tmp_path):
    text, recipe = (
        "clusters: [{name: a, gpu: l4, price: 1}, {name: b, gpu: l4}]",
        recipe_of("gpt2", "tuning: lora"),
    )
    for wanted, asks in (({"objective": "cheapest"}, "--objective cheapest"), ({"budget": 5.0}, "--budget")):
        with pytest.raises(RecipeError, match=f"{asks} compares costs, and .* has no price of b"):
            ranking_of(tmp_path, text, recipe, **wanted)
    offers = ranking_of(tmp_path, text, recipe).offers
    assert [offer.cost is None for offer in offers] == [False, True]


def checkpoint_seconds(offer, sharding=None, cards=None, **run):
    """Seconds that checkpoints cost where the plan of ``offer`` saves so."""
    plan = offer.priced.plan
    changed = replace(
        plan, run=replace(plan.run, saves_per_epoch=0, **run), sharding=sharding or plan.sharding,
        hardware=replace(plan.hardware, gpus_per_node=cards or plan.hardware.gpus_per_node),
    )  # fmt: skip
    return changed, job_seconds(replace(offer.priced, plan=changed), offer.run, offer.cluster)["checkpoints"]


def test_checkpoints_cost_time_where_they_are_not_written_beside_the_steps(ranked):
    offer = ranked().best
    plan, between = checkpoint_seconds(offer, save_every=10, async_save=False)
    saves = number_of_saves(plan, offer.run)
    assert saves == -(-offer.run.steps // 10)
    assert between == pytest.approx(saves * offer.priced.estimate.checkpoint_bytes / offer.cluster.storage)
    assert checkpoint_seconds(offer, save_every=10)[1] < between


def test_a_long_run_saves_as_often_as_training_does(ranked):
    """No more than half an hour between two checkpoints, where the recipe leaves it open."""
    offers = ranked().offers
    saves = [number_of_saves(offer.priced.plan, offer.run) for offer in offers]
    assert saves == [1, 1, 2, 6]
    assert all(offer.run.seconds / count <= 1800 for offer, count in zip(offers, saves, strict=True))


def test_with_ddp_the_first_rank_copies_all_that_is_saved(ranked):
    offer = ranked().best
    plan, seconds = checkpoint_seconds(offer, Ddp(), 4, save_every=offer.run.steps, async_save=True)
    copied = checkpoint_bytes(plan) / plan.hardware.gpu.host_bandwidth
    assert seconds - offer.priced.estimate.checkpoint_bytes / offer.cluster.storage == pytest.approx(copied)


def test_a_thread_beside_this_one_is_not_cut_off_by_a_fork(tmp_path, monkeypatch):
    """The planner's page answers in threads; a lock that one of them holds stays taken in a child."""
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", None)
    monkeypatch.setattr("fitune.planner.clusters.fleet.modules", {})  # as in a process without torch
    found = []
    thread = Thread(target=lambda: found.append(ranking_of(tmp_path, CLUSTERS)))
    thread.start()
    thread.join()
    assert found[0].best.cluster.name == "hopper"
