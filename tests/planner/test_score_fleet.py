"""A scoring on the clusters of a fleet: order, shares of the rows, what is refused, in training's words."""

import json

import pytest

from fitune.errors import NothingFits
from fitune.planner.answering import plan_answering
from fitune.planner.clusters.ranking import Wanted
from fitune.planner.clusters.score_fleet import rank_scoring
from fitune.recipe.fleet import Cluster, Fleet
from fitune.values.answering import NO_ADAPTER, Questions
from plans import known

HOPPER = Cluster(name="hopper", gpu="h100", gpus=8, nodes=2, price=3.0)
ADA = Cluster(name="ada", gpu="rtx-4090", gpus=4, price=0.7, free=0, wait=7200)
SMALL = Cluster(name="small", gpu="t4", price=0.5)
QUESTIONS = Questions(rows=100_000, prompt_tokens=20_000_000, longest_prompt=600, new_tokens=256)


def ranking(*clusters, model="llama-3.1-8b", **wanted):
    return rank_scoring(
        Fleet(source="fleet.yaml", clusters=clusters), Wanted(**wanted), QUESTIONS,
        lambda node, questions: plan_answering(
            known(model), questions, node, engines=("transformers", "vllm"), batch_size=16, adapter=NO_ADAPTER,
            price=0.0,
        ),
    )  # fmt: skip


def test_clusters_are_ranked_by_time_or_by_cost():
    fastest = [(offer.cluster.name, offer.nodes) for offer in ranking(HOPPER, ADA, SMALL).offers]
    assert fastest == [("hopper", 2), ("hopper", 1), ("ada", 1)]
    cheapest = ranking(HOPPER, ADA, SMALL, objective="cheapest")
    assert [offer.cluster.name for offer in cheapest.offers] == ["ada", "hopper", "hopper"]
    ((name, why),) = cheapest.without
    assert name == "small"
    assert "14.96" in why


def test_an_engine_on_each_device_answers_its_share():
    two, one = ranking(HOPPER).offers
    assert (two.engines, one.engines) == (16, 8)
    assert two.report.questions.rows == 6_250
    assert one.parts["scoring"] == pytest.approx(2 * two.parts["scoring"], rel=0.2)


def test_several_nodes_are_one_cluster_of_ray_and_a_job_of_kubernetes_has_one():
    two, one = ranking(HOPPER).offers
    assert two.details[-1].endswith(
        "--workers 16, in a Ray cluster of these 2 nodes, which has to run already"
    )
    assert one.details[-1].endswith("--workers 8")
    pod = HOPPER.model_copy(update={"kind": "kubernetes"})
    assert [offer.nodes for offer in ranking(pod).offers] == [1]


def test_a_model_larger_than_a_device_is_divided_over_one_node():
    (offer,) = ranking(HOPPER, model="llama-3.1-70b").offers
    assert (offer.nodes, offer.engines, offer.report.chosen.answering.devices) == (1, 1, 8)


def test_a_budget_refuses_with_the_cost_and_nothing_left_is_an_error():
    found = ranking(HOPPER, ADA, budget=ranking(ADA).offers[0].cost + 0.01)
    assert {offer.cluster.name for offer in found.offers} == {"ada"}
    assert "more than $" in found.refused[0][1]
    assert "in 2 h 0 min" in found.text()
    with pytest.raises(NothingFits, match="none is in time") as refused:
        ranking(ADA, deadline_seconds=60)
    assert refused.value.hint == "a later --deadline, or a smaller --max-new-tokens"
    with pytest.raises(NothingFits, match="nothing fits on any cluster"):
        ranking(SMALL)


def test_the_command_prints_the_ranking(tmp_path, call):
    rows, fleet = tmp_path / "rows.jsonl", tmp_path / "fleet.yaml"
    rows.write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n' * 40)
    fleet.write_text(
        "clusters:\n- {name: hopper, gpu: h100, gpus: 8, nodes: 2}\n- {name: ada, gpu: rtx-4090}\n"
    )
    words = ["score", "--model", "qwen3-8b", "--data", rows, "--fleet", fleet]
    text, data = (call(*words, *more).ends(0) for more in ([], ["--json"]))
    assert "40 rows: prompts of" in text
    offers = json.loads(data)["offers"]
    assert {offer["cluster"] for offer in offers} == {"hopper", "ada"}
    engine, engines = offers[0]["engine"], offers[0]["engines"]
    workers = f" --on ray --workers {engines}" if engines > 1 else ""
    assert f"run there with: --engine {engine}{workers}" in " ".join(text.split())
    assert [offer["seconds"] for offer in offers] == sorted(offer["seconds"] for offer in offers)
