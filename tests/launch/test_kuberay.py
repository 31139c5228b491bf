"""RayJobs of many plans: fields and rules of KubeRay, what the plan needs, hostile names, one owner of a run."""

import copy
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fitune.errors import FituneError, HardwareError, RecipeError, RunDirectoryError
from fitune.launch.draining import drain, has_ranks
from fitune.launch.manifests import _template
from fitune.planner.search import find_plan
from fitune.session.clusters.launching import launch_file, recipe_below, split_settings
from fitune.session.planning import plan_for, wanted_hardware
from fitune.session.recipes.reading import read_any_recipe
from fitune.spec import run_lock
from fitune.spec.machines.gpus import find_gpu
from fitune.spec.machines.job import job_name
from fitune.spec.model.model_config import load_model_spec
from fitune.spec.recipe.pins import pinned
from fitune.spec.recipe.recipe import canonical_keys, parse_recipe
from fitune.spec.run_directory import LOCK
from fitune.spec.run_lock import WAIT_VARIABLE, lock_directory
from fitune.units import GIB
from launch.manifests import wrong_with

ROOT = Path(__file__).parents[2]
NEEDED = ["image=registry.example/fitune:0.1.0", "claim=shared"]
RECIPES: dict[str, dict[str, Any]] = {
    "one device": {"model": "llama-3.2-1b", "tuning": "lora", "gpu": "rtx-4090"},
    "offloaded": {
        "model": "meta-llama/Llama-3.1-8B", "tuning": "full", "gpu": "a100-80gb", "gpus": 2, "host_memory": "512GiB",
        "offload_optimizer": "cpu", "zero": 3,
    },
    "two nodes": {
        "model": "meta-llama/Llama-3.1-70B", "tuning": "lora", "gpu": "h100", "gpus": 8, "nodes": 2, "packing": True,
    },
    "quantised": {"model": "tiiuae/falcon-180B", "tuning": "qlora", "gpu": "v100-32gb", "gpus": 8, "nodes": 2},
    "cheapest": {"model": "meta-llama/Llama-3.1-8B", "gpu": "l40s", "gpus": 4, "objective": "cheapest"},
}  # fmt: skip


def recipe_of(**settings):
    return parse_recipe(
        canonical_keys({"data": "train.jsonl", "output_dir": "runs/a", **settings}, where="test")
    )


def documents(recipe, *settings, needed=NEEDED):
    _, text = launch_file(recipe, "kuberay", settings=[*needed, *settings])
    config, job = yaml.safe_load_all(text)
    return config, job


def worker_of(job):
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return group, group["template"]["spec"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_plan_is_a_job_that_kuberay_takes_and_trains_what_was_planned(name):
    recipe = recipe_of(**RECIPES[name])
    planned = plan_for(recipe, purposes=("plan", "train")).chosen
    config, job = documents(recipe, "queue=gpus", "priority=high", "deadline=2d", "start_within=2h")
    assert wrong_with(job) == []
    hardware, [group, pod] = planned.plan.hardware, worker_of(job)
    assert shlex.split(job["spec"]["entrypoint"]) == [
        "fitune", "train", "/etc/fitune/recipe.yaml", "--on", "ray", "--ray-address", "auto", "--workers",
        str(hardware.num_gpus),
    ]  # fmt: skip
    assert group["replicas"] == hardware.nodes
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(hardware.gpus_per_node)
    read = parse_recipe(canonical_keys(yaml.safe_load(config["data"]["recipe.yaml"]), where="pods"))
    again = plan_for(read, purposes=("plan", "train")).chosen.plan
    differing = [
        part for part in ("model", "hardware", "tuning", "precision", "optimizer", "sharding", "offload", "recompute",
        "attention", "loss", "batch", "schedule") if getattr(again, part) != getattr(planned.plan, part)
    ]  # fmt: skip
    assert differing == []
    assert again.run.async_save == planned.plan.run.async_save
    assert (read.output_dir, read.data[0].path, read.resume) == (
        "/mnt/fitune/runs/a",
        "/mnt/fitune/train.jsonl",
        True,
    )


def test_requests_are_what_the_plan_needs():
    """Memory by hand: the plan's host bytes · 10/9, and 1 GiB + 2 × 0.5 GiB of /dev/shm."""
    recipe = recipe_of(**RECIPES["offloaded"])
    estimate = plan_for(recipe, purposes=("plan", "train")).chosen.estimate
    _, job = documents(recipe)
    _, pod = worker_of(job)
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits["memory"] == f"{-(-(estimate.host_bytes * 10 // 9 + 2 * GIB) // GIB)}Gi"
    assert int(limits["memory"][:-2]) > 100  # masters and moments of 8 B parameters wait there
    assert (
        pod["containers"][0]["resources"]["requests"]["cpu"] == "16"
    )  # 8 for each rank with an optimizer on the host
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert limits["ephemeral-storage"] == f"{-(-(12 * GIB + 2 * 8_030_261_248) // GIB)}Gi"
    assert pod["terminationGracePeriodSeconds"] > estimate.step_seconds + estimate.checkpoint_bytes / 500e6


def test_the_head_does_no_work_and_pods_hold_references_to_secrets():
    _, job = documents(
        recipe_of(**RECIPES["one device"]), "secrets=[hf-token, aws]", "extra_resources={rdma/hca: 1}"
    )
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    [container] = head["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert "affinity" not in head["template"]["spec"]
    assert container["envFrom"] == [{"secretRef": {"name": "hf-token"}}, {"secretRef": {"name": "aws"}}]
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    _, pod = worker_of(job)
    assert pod["containers"][0]["resources"]["limits"]["rdma/hca"] == "1"


def test_a_pod_that_is_stopped_gives_notice_and_waits_for_its_ranks(tmp_path, monkeypatch):
    """``ray`` here writes down what it was asked; the rank is a process with the name that Ray gives to one."""
    _, pod = worker_of(documents(recipe_of(**RECIPES["one device"]))[1])
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["python", "-m", "fitune.launch.draining"]
    assert 0 < int(command[3]) < pod["terminationGracePeriodSeconds"]
    (tmp_path / "ray").write_text(f'#!/bin/bash\necho "$*" > {tmp_path}/said\n')
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    drain(5, trains=lambda: False)
    assert not (tmp_path / "said").exists()  # after the run no rank is here, and nothing is waited for
    with subprocess.Popen(["ray::RayTrainWorker", "600"], executable="/bin/sleep") as rank:

        def trains():
            was_alive = rank.poll() is None
            if (tmp_path / "said").exists():  # a rank saves and ends once it is given notice
                rank.terminate()
                rank.wait()
            return was_alive

        assert has_ranks()
        drain(120, trains=trains)
        assert rank.poll() is not None
    assert (tmp_path / "said").read_text().startswith("drain-node --reason DRAIN_NODE_REASON_PREEMPTION")


def test_nodes_are_chosen_by_their_labels():
    recipe = recipe_of(**RECIPES["one device"])
    _, pod = worker_of(documents(recipe)[1])
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert terms == [
        {"matchExpressions": [
            {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-GeForce-RTX-4090"]}
        ]}
    ]  # fmt: skip
    _, pod = worker_of(documents(recipe, "instance_type=g6.xlarge", "node_selector={pool: spot}")[1])
    assert pod["nodeSelector"] == {"pool": "spot", "node.kubernetes.io/instance-type": "g6.xlarge"}
    assert "affinity" not in pod
    with pytest.raises(HardwareError, match="the label of nodes with titan-rtx is not known"):
        documents(recipe_of(model="llama-3.2-1b", gpu="titan-rtx"))


def test_labels_of_products_are_names_of_those_cards():
    """The driver's name, which the label is made of, is one spelling of the card's own."""
    for name, products in _template("products").items():
        for product in products:
            if product not in (
                "Tesla-V100-PCIE-32GB",
                "NVIDIA-A100-PCIE-40GB",
            ):  # slower boards of the same memory
                assert find_gpu(product.replace("-", " ")).name == name, product


@pytest.mark.parametrize(
    "output_dir",
    [
        "Runs/ÄÖÜ Ünïcode",
        "x" * 200,
        "runs/'; rm -rf $HOME; '",
        'runs/"quoted"',
        "runs/123",
        "--on",
        "runs/.hidden",
        "é",
    ],
)
def test_hostile_names_make_valid_manifests(output_dir):
    config, job = documents(
        recipe_of(model="llama-3.2-1b", tuning="lora", gpu="rtx-4090", output_dir=output_dir)
    )
    assert wrong_with(job) == []
    assert config["metadata"]["name"] == job["metadata"]["name"]
    assert yaml.safe_load(config["data"]["recipe.yaml"])["output_dir"] == f"/mnt/fitune/{output_dir}"
    assert "rm" not in shlex.split(job["spec"]["entrypoint"])


def test_one_run_has_one_name():
    assert job_name("/a/runs/x") == job_name("/a/runs/x") != job_name("/b/runs/x")
    assert re.fullmatch(r"x-[0-9a-f]{6}", job_name("/a/runs/x"))
    assert len(job_name("/a/" + "long-" * 40)) <= 47


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["image=a b"], "image = 'a b': is no image"),
        (["claim=Shared"], "claim = 'Shared': is no name of a Kubernetes object"),
        (["secrets=[\"a\\nb\"]"], "is no name of a Kubernetes object"),
        (["quue=gpus"], "unknown key 'quue'; did you mean 'queue'"),
        (["priority=high"], "no queue is named"),
        (["mount=../x"], "mount = '../x': is no absolute path"),
        (["grace=1s"], "job.grace = 1.00 s is shorter than a step and a save"),
        (["memory=1GiB"], "job.memory = 1.00 GiB, and the plan needs"),
        (["deadline=soon"], "'soon' is not a duration"),
        (["retries=-1"], "retries = -1"),
        (["name=Ab_c"], "job.name = 'Ab_c'"),
        (["ray_version=2.40.0"], "authentication by token needs Ray 2.52"),
        (["node_selector={a b: c}"], "'a b' is no key of a label"),
        (["secrets=hf_abcdefghijklmnopqrstuvwxyz0123456789"], "secrets|token"),
        (["image"], "--set job.image is not of the form key=value"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_in_words(settings, words):
    recipe = recipe_of(model="meta-llama/Llama-3.1-8B", tuning="full", gpu="h100", gpus=8)
    with pytest.raises(FituneError, match=words):
        documents(recipe, *settings)


def test_what_pods_cannot_see_is_refused():
    recipe = recipe_of(**RECIPES["one device"])
    for needed, words in (([], "no image"), (NEEDED[:1], "no volume claim")):
        with pytest.raises(RecipeError, match=words):
            documents(recipe, needed=needed)
    with pytest.raises(RecipeError, match="no GPU is named"):
        documents(recipe_of(model="llama-3.2-1b"))
    for setting, path in (
        ("data", "/home/me/a.jsonl"),
        ("output_dir", "../runs"),
        ("chat_template", "~/t.jinja"),
    ):
        with pytest.raises(RecipeError, match=f"{setting} = .* is not on the shared folder"):
            documents(recipe_of(**{**RECIPES["one device"], setting: path}))
    paths = ["s3://b/x.jsonl", "org/set:main#50", "/mnt/fitune/y.jsonl"]
    seen = recipe_below(recipe_of(model="a/b", data=paths), "/mnt/fitune", anywhere=False)
    assert [source.path for source in seen.data] == paths
    resumed = recipe_below(
        recipe_of(model="a/b", resume="runs/a/checkpoints/step-4"), "/mnt/fitune", anywhere=False
    )
    assert resumed.resume == "/mnt/fitune/runs/a/checkpoints/step-4"


def test_a_dataset_that_is_taken_for_one_of_the_hub_is_said():
    _, job = documents(recipe_of(**{**RECIPES["one device"], "data": ["org/set", "a.jsonl"]}))
    assert "not on this machine, so read from the Hub: org/set;" in str(job["metadata"]["annotations"])
    assert "Hub" not in str(documents(recipe_of(**RECIPES["one device"]))[1]["metadata"])


def test_a_run_that_goes_to_a_bucket_is_staged_on_the_shared_folder():
    text = str(documents(recipe_of(**{**RECIPES["one device"], "output_dir": "s3://bucket/run"})))
    assert "output_dir: /mnt/fitune/runs/run-" in text
    assert "upload_to: s3://bucket/run" in text


def test_settings_of_job_and_recipe_are_told_apart():
    assert split_settings(["job.image=a", "lora_r=8", "data.format=alpaca"]) == (
        ["lora_r=8", "data.format=alpaca"], ["image=a"],
    )  # fmt: skip


def test_a_pinned_recipe_has_the_same_plan():
    recipe = recipe_of(model="meta-llama/Llama-3.1-8B", gpu="rtx-4090", gpus=4)
    model, hardware = load_model_spec(recipe.model), wanted_hardware(recipe)
    plan = find_plan(recipe, model=model, hardware=hardware).chosen.plan
    assert find_plan(pinned(recipe, plan), model=model, hardware=hardware).chosen.plan == plan


_JOB = documents(recipe_of(**RECIPES["one device"]))[1]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["metadata"].update(name="x" * 48),
        lambda job: job["spec"].update(backofLimit=1),
        lambda job: job["spec"].update(backoffLimit=-1),
        lambda job: job["spec"].update(activeDeadlineSeconds=0),
        lambda job: job["spec"].update(submissionMode="Mode"),
        lambda job: job["spec"]["rayClusterSpec"].update(rayVersion="2.9.0"),
        lambda job: worker_of(job)[0].update(minReplicas=5),
        lambda job: worker_of(job)[0]["rayStartParams"].update({"num-cpus": 4}),
        lambda job: worker_of(job)[1]["containers"].clear(),
        lambda job: worker_of(job)[1]["containers"][0]["resources"]["requests"].update(
            {"nvidia.com/gpu": "2"}
        ),
    ],
)
def test_the_rules_of_this_test_refuse_what_breaks_them(spoil):
    spoiled = copy.deepcopy(_JOB)
    spoil(spoiled)
    assert wrong_with(_JOB) == []
    assert wrong_with(spoiled)


_HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_an_attempt_waits_until_the_one_before_has_let_go(tmp_path, monkeypatch):
    command = [sys.executable, "-c", _HOLDS, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as earlier:
        assert earlier.stdout is not None
        assert earlier.stdout.readline() == "held\n"
        with (
            pytest.raises(RunDirectoryError, match="is in use by another live run"),
            lock_directory(tmp_path),
        ):
            pass
        monkeypatch.setenv(WAIT_VARIABLE, "120")
        ends_meanwhile = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: earlier.communicate())
        monkeypatch.setattr(run_lock, "time", ends_meanwhile)
        with lock_directory(tmp_path):
            assert earlier.returncode == 0


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_wait_that_is_no_time_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv(WAIT_VARIABLE, text)
    with pytest.raises(RunDirectoryError, match=WAIT_VARIABLE), lock_directory(tmp_path):
        pass


@pytest.mark.parametrize(
    ("recipe", "example"),
    [
        ("llama3.1-70b_lora_2x8x80gb", "rayjob_llama3.1-70b"),
        ("falcon-180b_qlora_16x32gb", "rayjob_falcon-180b"),
    ],
)
def test_the_manifests_that_are_shown_are_those_that_are_written(recipe, example):
    """Their first line is the command. Predicted figures in words may change with the estimate."""
    read = read_any_recipe(ROOT / f"recipes/{recipe}.yaml", options={"data": "train.jsonl"}).recipe
    _, text = launch_file(read, "kuberay", job_file=ROOT / "examples/job.yaml", settings=())
    written, shown = (
        [document for document in yaml.safe_load_all(one)]
        for one in (text, (ROOT / f"examples/{example}.yaml").read_text())
    )
    for documents_of in (written, shown):
        documents_of[1]["metadata"].pop("annotations")
        assert wrong_with(documents_of[1]) == []
    assert written == shown
