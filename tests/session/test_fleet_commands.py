"""``plan --fleet`` and ``launch --fleet``: the winner's file, the next one when it is full, and asking clusters."""

import json
import stat

import pytest
import yaml

from fitune.errors import HardwareError, RecipeError
from fitune.recipe.fleet import Cluster
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.session.clusters import live_fleet
from fitune.session.clusters.fleet import FleetRequest, draw_ranking, launch_text, plan_on_fleet
from fitune.session.clusters.live_fleet import free_nodes
from fitune.session.planning import plan_for
from fitune.values.machines.hardware import Measured
from launch.manifests import wrong_with

JOB = "{image: 'i:1', claim: c, queue: q, context: east, namespace: team}"
FLEET = f"""
clusters:
  - {{name: fast, gpu: l40s, gpus: 1, price: 1, host_memory: 256GiB, instance_type: g6e, job: {JOB}}}
  - {{name: slow, gpu: l4, gpus: 1, price: 1, kind: slurm, job: {{queue: gpu}}}}
"""


def recipe_of(**settings):
    wanted = {
        "model": "llama-3.2-1b", "tuning": "lora", "micro_batch_size": 1, "data": "a.jsonl", "output_dir": "runs/a",
    }  # fmt: skip
    return parse_recipe(canonical_keys({**wanted, **settings}, where="test"))


def request_of(folder, text=FLEET, **options):
    (folder / "fleet.yaml").write_text(text)
    return FleetRequest(folder / "fleet.yaml", **{"rows": 1000, **options})


def test_the_winner_is_launched_and_the_next_one_when_it_is_full(tmp_path):
    text, place = launch_text(recipe_of(), request_of(tmp_path), ["deadline=1h"], on=None)
    assert place == "fast, 1 node"
    config, job = yaml.safe_load_all(text)
    assert wrong_with(job) == []
    assert (job["metadata"]["namespace"], job["spec"]["activeDeadlineSeconds"]) == ("team", 3600)
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["template"]["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "g6e"}
    recipe = yaml.safe_load(config["data"]["recipe.yaml"])
    assert (recipe["gpu"], recipe["gpus"], recipe["nodes"]) == ("l40s", 1, 1)
    full = FLEET.replace("gpus: 1, price: 1, host", "gpus: 1, free: 0, price: 1, host")
    text, place = launch_text(recipe_of(), request_of(tmp_path, full), [], on=None)
    assert place == "slow, 1 node (fast, 1 node: full now)"
    assert "#SBATCH --partition=gpu" in text
    all_full = full.replace("gpu: l4, gpus: 1", "gpu: l4, gpus: 1, free: 0")
    with pytest.raises(HardwareError, match="every cluster is full: fast, 1 node, slow, 1 node"):
        launch_text(recipe_of(), request_of(tmp_path, all_full), [], on=None)


def test_a_fleet_is_planned_and_launched_by_commands(tmp_path, call):
    request_of(tmp_path)
    words = ["--model", "llama-3.2-1b", "--micro-batch-size", "1", "--tuning", "lora", "--rows", "1000"]
    words += ["--fleet", str(tmp_path / "fleet.yaml")]
    offers = json.loads(call("plan", *words, "--json").ends(0))["offers"]
    assert [offer["cluster"] for offer in offers] == ["fast", "slow"]
    call("launch", *words, "--objective", "cheapest").ends(0, "kind: RayJob")
    call("launch", *words, "--on", "slurm").ends(2, "takes the kind of the cluster that it chooses")


def test_rows_come_from_the_data_or_are_said(tmp_path, data_file):
    def best(**settings):
        return plan_on_fleet(recipe_of(**settings), request_of(tmp_path, rows=None)).best.run

    assert best(data=str(data_file)).epoch.rows == 56
    assert best(data=[], max_steps=10).steps == 10
    assert plan_on_fleet(recipe_of(), request_of(tmp_path)).best.run.epoch.tokens == 1000 * 2048
    with pytest.raises(RecipeError, match="number of rows, and no data is named"):
        best(data=[])


def test_what_was_measured_of_a_card_counts_as_where_it_is_named(tmp_path, monkeypatch):
    """A proof of its kind gives back the 3 % that a card never measured keeps free."""
    proved = Measured(cards=1, memory_error=0.01, speed_error=0.0)
    monkeypatch.setattr("fitune.measure.hardware.measured_on", lambda key: proved if key == "l4" else None)
    offers = {offer.cluster.gpu: offer for offer in plan_on_fleet(recipe_of(), request_of(tmp_path)).offers}
    for gpu in ("l4", "l40s"):
        named = plan_for(recipe_of(gpu=gpu)).taken.estimate
        assert offers[gpu].priced.estimate.usable_bytes == named.usable_bytes
    assert offers["l4"].priced.plan.hardware.measured == proved


def test_keys_of_the_recipe_about_another_machine_are_told(tmp_path):
    told = "not the recipe's gpu, host_memory: each cluster has its own"
    for settings in ({"gpu": "h100", "host_memory": "1GiB"}, {}):
        text = plan_on_fleet(recipe_of(**settings), request_of(tmp_path)).text()
        assert (told in text) == bool(settings)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "least-memory"}, "--objective least-memory is not for clusters"),
        ({"deadline": "soon"}, "--deadline: 'soon' is not a duration"),
        ({"deadline": "0h"}, "--deadline 0h is over already"),
    ],
)
def test_wishes_that_cannot_be_kept_are_refused(tmp_path, options, words):
    with pytest.raises(RecipeError, match=words):
        plan_on_fleet(recipe_of(), request_of(tmp_path, **options))


def test_the_picture_has_a_point_for_every_offer(tmp_path):
    ranking = plan_on_fleet(recipe_of(), request_of(tmp_path))
    draw_ranking(ranking, tmp_path / "fleet.svg")
    drawn = (tmp_path / "fleet.svg").read_text()
    assert "fast (taken)" in drawn
    assert "slow" in drawn
    with pytest.raises(RecipeError, match="must end in .svg"):
        draw_ranking(ranking, tmp_path / "fleet.png")
    unpriced = plan_on_fleet(recipe_of(), request_of(tmp_path, FLEET.replace("price: 1, ", "")))
    with pytest.raises(RecipeError, match="no cluster has a price"):
        draw_ranking(unpriced, tmp_path / "fleet.svg")


H100 = "NVIDIA-H100-80GB-HBM3"


def node(name, gpus, *, ready="True", cordoned=False, product=H100):
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": product}}, "spec": {"unschedulable": cordoned},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}, "conditions": [{"type": "Ready", "status": ready}]},
    }  # fmt: skip


PODS = [
    {"spec": {"nodeName": "a", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "2"}}}]}},
    {"spec": {"containers": [{"resources": {}}]}},
]
ANSWERS = {
    "nodes": {"items": [node("a", 8), node("b", 8), node("c", 8, ready="False"), node("d", 8, cordoned=True),
                        node("e", 4), node("f", 8, product="Tesla-T4")]},
    "pods": {"items": PODS},
    "localqueues.kueue.x-k8s.io": {"spec": {"clusterQueue": "big"}},
    "clusterqueues.kueue.x-k8s.io": {
        "spec": {"resourceGroups": [
            {"flavors": [
                {"name": "hopper", "resources": [
                    {"name": "nvidia.com/gpu", "nominalQuota": "32"}, {"name": "cpu", "nominalQuota": 9},
                ]},
                {"name": "turing", "resources": [{"name": "nvidia.com/gpu", "nominalQuota": "64"}]},
            ]},
        ]},
        "status": {"flavorsReservation": [
            {"name": "hopper", "resources": [{"name": "nvidia.com/gpu", "total": "12"}]},
        ]},
    },
    "resourceflavors.kueue.x-k8s.io": {"items": [
        {"metadata": {"name": "hopper"}, "spec": {"nodeLabels": {"pool": "new"}}},
        {"metadata": {"name": "turing"}, "spec": {"nodeLabels": {"nvidia.com/gpu.product": "Tesla-T4"}}},
    ]},
}  # fmt: skip
IDLE = """\
n1 gpu:h100:8(S:0-1)
n1 gpu:h100:8(S:0-1)
n2 gpu:8
n3 gpu:t4:8
n4 gpu:H100:4,shard:8
n5 (null)
"""


@pytest.fixture
def cluster_programs(tmp_path, monkeypatch):
    """``kubectl`` and ``sinfo`` on the path, which answer as a cluster would, and write down what they were asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for kind, answer in ANSWERS.items():
        (folder / f"{kind}.json").write_text(json.dumps(answer))
    (folder / "idle").write_text(IDLE)
    programs = {
        "kubectl": f'echo "$*" >> {folder}/asked\nshift 2\n[ "$1" = get ] && cat {folder}/"$2".json',
        "sinfo": f"cat {folder}/idle",
    }
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


@pytest.mark.parametrize(("live", "free"), [("nodes", 1), ("kueue", 2), ("slurm", 2)])
def test_clusters_are_asked_for_free_nodes(cluster_programs, live, free):
    """8 H100 of b are free; 32 - 12 of their quota are two nodes of 8; n1, in two partitions, and n2 are idle."""
    job = {"queue": "q"} if live == "slurm" else {"queue": "q", "context": "east", "namespace": "team"}
    kind = "slurm" if live == "slurm" else "kuberay"
    cluster = Cluster(name="c", gpu="h100", gpus=8, nodes=4, live=live, kind=kind, job=job)
    assert free_nodes(cluster) == free
    if live != "slurm":
        assert all(
            line.startswith("--context east get")
            for line in (cluster_programs / "asked").read_text().splitlines()
        )


def test_live_without_a_cluster_that_can_be_asked_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="--live asks clusters what is free, and none in .*fleet.yaml"):
        plan_on_fleet(recipe_of(), request_of(tmp_path, live=True))


def test_free_nodes_that_nobody_told_and_nobody_was_asked_for_are_said_to_be_assumed(
    cluster_programs, tmp_path
):
    text = FLEET.replace("gpu: l40s", "live: nodes, gpu: l40s")
    unasked = plan_on_fleet(recipe_of(), request_of(tmp_path, text)).text()
    assert "all nodes are free: fast, slow" in unasked
    asked = plan_on_fleet(recipe_of(), request_of(tmp_path, text, live=True)).text()
    assert "all nodes are free: slow" in asked


def test_a_cluster_that_does_not_answer_is_an_error(cluster_programs, tmp_path, monkeypatch):
    text = FLEET.replace("gpu: l40s", "live: nodes, gpu: l40s")
    assert plan_on_fleet(recipe_of(), request_of(tmp_path, text)).best.is_free  # nobody asked
    pods = cluster_programs / "pods.json"
    for break_it, why in (
        (pods.unlink, "kubectl --context east get .*"),
        (lambda: pods.write_text("no JSON"), "it did not answer in JSON"),
        (lambda: monkeypatch.setenv("PATH", str(tmp_path)), "there is no program kubectl here"),
    ):
        break_it()
        with pytest.raises(HardwareError, match=f"cluster fast cannot be asked what is free: .*{why}"):
            plan_on_fleet(recipe_of(), request_of(tmp_path, text, live=True))


@pytest.mark.parametrize(
    ("kind", "gpu", "another"),
    [
        ("H100", "h100-pcie", False), ("tesla", "h100", False), ("", "h100", False), ("A100-80G", "a100-80gb", False),
        ("rtx_4090", "rtx-4090", False), ("T4", "h100", True), ("l4", "l40s", True),
    ],
)  # fmt: skip
def test_a_word_for_a_card_may_be_another_card(kind, gpu, another):
    assert live_fleet._is_another_card(kind, gpu) == another
