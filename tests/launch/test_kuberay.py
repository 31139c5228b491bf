"""RayJobs of many plans: fields and rules of KubeRay, what the plan needs, hostile names, one owner of a run."""

import copy
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fitune.errors import FituneError, HardwareError, RecipeError, RunDirectoryError
from fitune.launch.draining import drain, has_ranks
from fitune.launch.manifests import _template
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.recipe.strict_yaml import parse_value
from fitune.session.clusters.launching import launch_file, recipe_below, split_settings
from fitune.session.planning import plan_for
from fitune.session.recipes.reading import read_any_recipe
from fitune.units import GIB
from fitune.values import run_lock
from fitune.values.machines.gpus import find_gpu
from fitune.values.run_directory import LOCK
from fitune.values.run_lock import WAIT_VARIABLE, lock_directory
from launch.manifests import wrong_with
from plans import recipe_of

ROOT = Path(__file__).parents[2]
NEEDED = ("image=registry.example/fitune:0.1.0", "claim=shared")
RECIPES = {
    "one device": "model: gpt2, tuning: lora, gpu: rtx-4090",
    "offloaded": "model: meta-llama/Llama-3.1-8B, tuning: full, gpu: a100-80gb, gpus: 2, host_memory: 512GiB, "
    "offload_optimizer: cpu, zero: 3",
    "two nodes": "model: meta-llama/Llama-3.1-70B, tuning: lora, gpu: h100, gpus: 8, nodes: 2, packing: true",
    "quantised": "model: meta-llama/Llama-2-13b-hf, tuning: qlora, gpu: v100-32gb, gpus: 8, nodes: 2",
    "cheapest": "model: gpt2, tuning: lora, gpu: l40s, gpus: 4, objective: cheapest",
}  # fmt: skip


def asked(name="one device", **settings):
    """A recipe of the table, or another one, with its data and its folder."""
    written = parse_value(f"{{{RECIPES.get(name, name)}}}", where="test")
    return recipe_of(**{"data": "train.jsonl", "output_dir": "runs/a", **written, **settings})


def documents(recipe, *settings, needed=NEEDED):
    """The ConfigMap, the RayJob, the group of its workers, their pod and its container."""
    _, text = launch_file(recipe, "kuberay", settings=[*needed, *settings])
    config, job = yaml.safe_load_all(text)
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    return config, job, group, pod, pod["containers"][0]


@cache
def one_device():
    return documents(asked())


@pytest.mark.parametrize("name", RECIPES)
def test_every_plan_is_a_job_that_kuberay_takes_and_trains_what_was_planned(name):
    recipe = asked(name)
    planned = plan_for(recipe, purposes=("plan", "train")).chosen.plan
    config, job, group, _, container = documents(recipe)
    assert wrong_with(job) == []
    hardware = planned.hardware
    train = "fitune train /etc/fitune/recipe.yaml --on ray --ray-address auto --workers"
    assert shlex.split(job["spec"]["entrypoint"]) == [*train.split(), str(hardware.num_gpus)]
    assert group["replicas"] == hardware.nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(hardware.gpus_per_node)
    read = parse_recipe(canonical_keys(yaml.safe_load(config["data"]["recipe.yaml"]), where="pods"))
    again = plan_for(read, purposes=("plan", "train")).chosen.plan
    ours = replace(again, model_path=planned.model_path, data=planned.data, run=planned.run)
    assert ours == planned
    assert again.run.async_save == planned.run.async_save
    assert (read.output_dir, read.data[0].path) == ("/mnt/fitune/runs/a", "/mnt/fitune/train.jsonl")
    assert read.resume is True


def test_requests_are_what_the_plan_needs():
    """Memory by hand: the plan's host bytes · 10/9, and 1 GiB + 2 × 0.5 GiB of /dev/shm."""
    recipe = asked("offloaded")
    estimate = plan_for(recipe, purposes=("plan", "train")).chosen.estimate
    _, _, _, pod, container = documents(recipe)
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits["memory"] == f"{-(-(estimate.host_bytes * 10 // 9 + 2 * GIB) // GIB)}Gi"
    assert int(limits["memory"][:-2]) > 100  # masters and moments of 8 B parameters wait there
    assert requests["cpu"] == "16"  # 8 for each rank with an optimizer on the host
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert limits["ephemeral-storage"] == f"{-(-(12 * GIB + 2 * 8_030_261_248) // GIB)}Gi"
    assert pod["terminationGracePeriodSeconds"] > estimate.step_seconds + estimate.checkpoint_bytes / 500e6


def test_the_head_does_no_work_and_pods_hold_references_to_secrets():
    settings = (
        "secrets=[hf-token, aws]",
        "image_pull_secrets=[reg]",
        "service_account=me",
        "extra_resources={rdma/hca: 1}",
    )
    _, job, _, pod, worker = documents(asked(), *settings)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    [container] = head["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert "affinity" not in head
    for each in (container, worker):
        assert each["envFrom"] == [{"secretRef": {"name": "hf-token"}}, {"secretRef": {"name": "aws"}}]
    assert (pod["imagePullSecrets"], pod["serviceAccountName"]) == ([{"name": "reg"}], "me")
    assert pod["automountServiceAccountToken"] is True
    assert worker["resources"]["limits"]["rdma/hca"] == "1"
    assert wrong_with(job) == []


def test_a_pod_that_is_stopped_gives_notice_and_waits_for_its_ranks(tmp_path, monkeypatch):
    """``ray`` here writes down what it was asked; the rank is a process with the name that Ray gives to one."""
    *_, pod, container = one_device()
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:3] == ["python", "-m", "fitune.launch.draining"]
    assert 0 < int(command[3]) < pod["terminationGracePeriodSeconds"]
    (tmp_path / "ray").write_text(f'#!/bin/bash\necho "$*" > {tmp_path}/said\n')
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("fitune.launch.draining._LOOK_SECONDS", 0.01)
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
    *_, pod, _ = one_device()
    wanted = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    product = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-GeForce-RTX-4090"]}
    assert wanted == {"nodeSelectorTerms": [{"matchExpressions": [product]}]}
    *_, pod, _ = documents(asked(), "instance_type=g6.xlarge", "node_selector={pool: spot}")
    assert pod["nodeSelector"] == {"pool": "spot", "node.kubernetes.io/instance-type": "g6.xlarge"}
    assert "affinity" not in pod
    with pytest.raises(HardwareError, match="the label of nodes with titan-rtx is not known"):
        documents(asked(gpu="titan-rtx"))


def test_labels_of_products_are_names_of_those_cards():
    """The driver's name, which the label is made of, is one spelling of the card's own."""
    slower = ("Tesla-V100-PCIE-32GB", "NVIDIA-A100-PCIE-40GB")  # boards of the same memory
    named = {product: name for name, products in _template("products").items() for product in products}
    for product in named.keys() - {*slower}:
        assert find_gpu(product.replace("-", " ")).name == named[product]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (lambda job, group: job["metadata"], {"name": "x" * 48}),
        (lambda job, group: job["spec"], {"backofLimit": 1}),
        (lambda job, group: job["spec"], {"backoffLimit": -1}),
        (lambda job, group: job["spec"], {"activeDeadlineSeconds": 0}),
        (lambda job, group: job["spec"], {"submissionMode": "Mode"}),
        (lambda job, group: job["spec"]["rayClusterSpec"], {"rayVersion": "2.9.0"}),
        (lambda job, group: group, {"minReplicas": 5}),
        (lambda job, group: group["rayStartParams"], {"num-cpus": 4}),
        (lambda job, group: group["template"]["spec"], {"containers": []}),
        (lambda job, group: group["template"]["spec"]["containers"][0]["resources"]["requests"],
         {"nvidia.com/gpu": "2"}),
    ],
)  # fmt: skip
def test_the_rules_of_this_test_refuse_what_breaks_them(place, wrong):
    _, job, group, *_ = copy.deepcopy(one_device())
    assert wrong_with(job) == []
    place(job, group).update(wrong)
    assert wrong_with(job)


@pytest.mark.parametrize(
    "output_dir", ["Runs/ÄÖÜ Ünïcode", "x" * 200, "runs/'; rm -rf $HOME; '", "runs/123", "--on"]
)
def test_hostile_names_make_valid_manifests(output_dir):
    config, job, *_ = documents(asked(output_dir=output_dir))
    assert wrong_with(job) == []
    assert config["metadata"]["name"] == job["metadata"]["name"]
    assert yaml.safe_load(config["data"]["recipe.yaml"])["output_dir"] == f"/mnt/fitune/{output_dir}"
    assert "rm" not in shlex.split(job["spec"]["entrypoint"])
    other = documents(asked(output_dir=f"{output_dir}2"))[1]
    assert other["metadata"]["name"] != job["metadata"]["name"], "two runs have two names"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("image=a b", "image = 'a b': is no image"),
        ("claim=Shared", "claim = 'Shared': is no name of a Kubernetes object"),
        ('secrets=["a\\nb"]', "is no name of a Kubernetes object"),
        ("quue=gpus", "unknown key 'quue'; did you mean 'queue'"),
        ("priority=high", "no queue is named"),
        ("mount=../x", "mount = '../x': is no absolute path"),
        ("grace=1s", "job.grace = 1.00 s is shorter than a step and a save"),
        ("memory=1GiB", "job.memory = 1.00 GiB, and the plan needs"),
        ("deadline=soon", "'soon' is not a duration"),
        ("retries=-1", "retries = -1"),
        ("name=Ab_c", "job.name = 'Ab_c'"),
        ("ray_version=2.51.9", "authentication by token needs Ray 2.52"),
        ("node_selector={a b: c}", "'a b' is no key of a label"),
        ("secrets=hf_abcdefghijklmnopqrstuvwxyz0123456789", "secrets|token"),
        ("image", "--set job.image is not of the form key=value"),
    ],
)
def test_bad_settings_are_refused_in_words(setting, words):
    with pytest.raises(FituneError, match=words):
        documents(asked("model: qwen3-0.6b, tuning: full, gpu: h100"), setting)


def test_each_process_of_a_node_has_a_core():
    """Ray gives every worker one: with fewer it waits for room that no pod will have."""
    with pytest.raises(
        FituneError, match="job.cpus = 1, and each of the plan's 2 processes on a node needs a core"
    ):
        documents(asked("model: qwen3-0.6b, tuning: full, gpu: h100, gpus: 2"), "cpus=1")


def test_what_pods_cannot_see_is_refused():
    for needed, words in (([], "no image"), (NEEDED[:1], "no volume claim")):
        with pytest.raises(RecipeError, match=words):
            documents(asked(), needed=needed)
    with pytest.raises(RecipeError, match="no GPU is named"):
        documents(asked("model: gpt2"))
    for setting, path in (
        ("data", "/home/me/a.jsonl"),
        ("output_dir", "../runs"),
        ("chat_template", "~/t.jinja"),
    ):
        with pytest.raises(RecipeError, match=f"{setting} = .* is not on the shared folder"):
            documents(asked(**{setting: path}))
    paths = ["s3://b/x.jsonl", "org/set:main#50", "/mnt/fitune/y.jsonl"]
    own = asked(data=paths, resume="runs/a/checkpoints/step-4", chat_template="{{ messages }}")
    below = recipe_below(own, "/mnt/fitune", anywhere=False)
    assert ([source.path for source in below.data], below.chat_template) == (paths, "{{ messages }}")
    assert below.resume == "/mnt/fitune/runs/a/checkpoints/step-4"


def test_a_dataset_that_is_taken_for_one_of_the_hub_is_said():
    _, job, *_ = documents(asked(data=["org/set", "a.jsonl"]))
    assert "not on this machine, so read from the Hub: org/set;" in str(job["metadata"]["annotations"])
    assert "Hub" not in str(one_device()[1]["metadata"])


def test_a_run_that_goes_to_a_bucket_is_staged_on_the_shared_folder():
    text = str(documents(asked(output_dir="s3://bucket/run")))
    assert "output_dir: /mnt/fitune/runs/run-" in text
    assert "upload_to: s3://bucket/run" in text


def test_settings_of_job_and_recipe_are_told_apart():
    assert split_settings(["job.image=a", "lora_r=8", "data.format=alpaca"]) == (
        ["lora_r=8", "data.format=alpaca"], ["image=a"],
    )  # fmt: skip


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


@pytest.mark.parametrize("text", ["-1", "nan"])
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
    read = read_any_recipe(ROOT / f"recipes/{recipe}.yaml", options={"data": "train.jsonl"})
    _, written = launch_file(read, "kuberay", job_file=ROOT / "examples/job.yaml", settings=())
    read_back = []
    for text in (written, (ROOT / f"examples/{example}.yaml").read_text()):
        config, job = yaml.safe_load_all(text)
        job["metadata"].pop("annotations")
        assert wrong_with(job) == []
        read_back.append((config, job))
    assert read_back[0] == read_back[1]
