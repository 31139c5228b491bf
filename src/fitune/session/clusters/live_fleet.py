"""Free nodes of clusters that are asked: kubectl for nodes and for Kueue's quota, sinfo, or Ray for its resources.

Nothing here is called unless somebody asks with --live.
"""

import json
import logging
import subprocess
from collections import Counter
from dataclasses import replace
from typing import Any

from fitune.errors import HardwareError, MissingExtra, RecipeError
from fitune.spec.machines.job import GPU_RESOURCE
from fitune.spec.recipe.fleet import Cluster, Fleet

_SECONDS = 20.0
"""A cluster that does not answer in this time is an error, not a wait."""


def with_free_nodes(fleet: Fleet) -> Fleet:
    """The fleet with ``free`` as clusters with ``live`` say.

    Raises RecipeError where no cluster has ``live``, HardwareError where one does not answer.
    """
    if not any(cluster.live for cluster in fleet.clusters):
        raise RecipeError(
            f"--live asks clusters what is free, and none in {fleet.source} says who is asked",
            hint="live: nodes, kueue, slurm or ray for each cluster that can be asked, or leave --live out",
        )
    clusters = tuple(
        cluster if cluster.live is None else cluster.model_copy(update={"free": free_nodes(cluster)})
        for cluster in fleet.clusters
    )
    return replace(fleet, clusters=clusters)


def free_nodes(cluster: Cluster) -> int:
    """Nodes that are free now, at most all of the cluster."""
    match cluster.live:
        case "nodes":
            count = free_by_nodes(cluster)
        case "kueue":
            count = free_by_kueue(cluster)
        case "slurm":
            count = free_by_slurm(cluster)
        case "ray":
            count = free_by_ray(cluster)
        case None:
            count = cluster.free_nodes
    return min(cluster.nodes, count)


def free_by_nodes(cluster: Cluster) -> int:
    """Ready nodes on which no pod has a GPU of those that the job needs."""
    nodes = _kubectl(cluster, "get", "nodes")["items"]
    running = "status.phase!=Succeeded,status.phase!=Failed"
    taken: Counter[str] = Counter()
    for pod in _kubectl(cluster, "get", "pods", "--all-namespaces", f"--field-selector={running}")["items"]:
        for container in pod["spec"].get("containers", []):
            requests = container.get("resources", {}).get("requests", {})
            taken[pod["spec"].get("nodeName", "")] += int(requests.get(GPU_RESOURCE, 0))
    free = (
        int(node["status"].get("allocatable", {}).get(GPU_RESOURCE, 0)) - taken[node["metadata"]["name"]]
        for node in nodes
        if _is_usable(node)
    )
    return sum(count >= cluster.gpus for count in free)


def _is_usable(node: dict[str, Any]) -> bool:
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in node["status"].get("conditions", [])
    )
    return ready and not node["spec"].get("unschedulable", False)


def free_by_kueue(cluster: Cluster) -> int:
    """Whole nodes of GPUs in the quota of the job's queue that no workload has reserved."""
    settings = cluster.settings
    if not settings.queue:
        raise HardwareError(f"cluster {cluster.name}: live: kueue needs job.queue", hint="job: {queue: NAME}")
    local = _kubectl(cluster, "get", "localqueues.kueue.x-k8s.io", settings.queue, *_namespace(cluster))
    queue = _kubectl(cluster, "get", "clusterqueues.kueue.x-k8s.io", local["spec"]["clusterQueue"])
    quota = sum(
        int(resource["nominalQuota"])
        for group in queue["spec"].get("resourceGroups", [])
        for flavor in group["flavors"]
        for resource in flavor["resources"]
        if resource["name"] == GPU_RESOURCE
    )
    reserved = sum(
        int(resource["total"])
        for flavor in queue.get("status", {}).get("flavorsReservation", [])
        for resource in flavor["resources"]
        if resource["name"] == GPU_RESOURCE
    )
    return max(0, quota - reserved) // cluster.gpus


def free_by_slurm(cluster: Cluster) -> int:
    """Idle nodes of the job's partition."""
    partition = ["--partition", cluster.settings.queue] if cluster.settings.queue else []
    said = _answer(cluster, ["sinfo", "--noheader", "--states=idle", "--format=%D", *partition])
    return sum(int(line) for line in said.split() if line.isdecimal())


def free_by_ray(cluster: Cluster) -> int:
    """Whole nodes of the GPUs that are free in the Ray cluster of RAY_ADDRESS or of this machine."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("asking a Ray cluster", extra="ray") from None
    try:
        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HardwareError(
            f"cluster {cluster.name}: no Ray cluster answers: {str(error).splitlines()[0]}",
            hint="RAY_ADDRESS=HOST:PORT, or leave --live out",
        ) from None
    available: dict[str, float] = ray.available_resources()
    return int(available.get("GPU", 0)) // cluster.gpus


def _namespace(cluster: Cluster) -> list[str]:
    namespace = cluster.settings.namespace
    return ["--namespace", namespace] if namespace else []


def _kubectl(cluster: Cluster, *words: str) -> dict[str, Any]:
    context = cluster.settings.context
    command = ["kubectl", *(["--context", context] if context else []), *words, "--output=json"]
    said = _answer(cluster, command)
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        raise _silent(cluster, command, "it did not answer in JSON") from None
    return found


def _answer(cluster: Cluster, command: list[str]) -> str:
    """Output of the command. Raises HardwareError where it is missing, fails or takes too long."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise _silent(cluster, command, f"there is no program {command[0]} here") from None
    except subprocess.TimeoutExpired:
        raise _silent(cluster, command, f"no answer in {_SECONDS:g} s") from None
    if ended.returncode:
        raise _silent(cluster, command, (ended.stderr.strip().splitlines() or ["it failed"])[-1])
    return ended.stdout


def _silent(cluster: Cluster, command: list[str], why: str) -> HardwareError:
    return HardwareError(
        f"cluster {cluster.name} cannot be asked what is free: {' '.join(command[:4])} …: {why}",
        hint="free: in the fleet file, and no --live",
    )
