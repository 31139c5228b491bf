"""Free nodes of clusters that are asked: kubectl for nodes and for Kueue's quota, sinfo, or Ray for its resources.

Nothing here is called unless somebody asks with --live.
"""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fitune.errors import HardwareError, RecipeError, first_line
from fitune.launch.manifests import PRODUCT_LABEL, node_selector, products
from fitune.launch.ray_cluster import loaded_ray
from fitune.recipe.fleet import Cluster, Fleet
from fitune.recipe.job import GPU_RESOURCE
from fitune.values.machines.cards import known_cards
from fitune.values.machines.gpus import find_gpu

_SECONDS = 20.0
"""A cluster that does not answer in this time is an error, not a wait."""
_PLACING_SECONDS = 2.0
"""Ray places what has room within some milliseconds."""


def with_free_nodes(fleet: Fleet) -> Fleet:
    """The fleet with ``free`` as clusters with ``live`` say.

    Raises RecipeError where no cluster has ``live``, HardwareError where one does not answer.
    """
    if not any(cluster.live for cluster in fleet.clusters):
        raise RecipeError(
            f"--live asks clusters what is free, and none in {fleet.source} says who is asked",
            hint="live: nodes, kueue, slurm or ray for each cluster that can be asked, or leave --live out",
        )
    clusters = (each.model_copy(update={"free": free_nodes(each)}) for each in fleet.clusters)
    return replace(fleet, clusters=tuple(clusters))


def free_nodes(cluster: Cluster) -> int | None:
    """Nodes that are free now, at most all of the cluster; as the file says where nobody can be asked."""
    asked = {"nodes": free_by_nodes, "kueue": free_by_kueue, "slurm": free_by_slurm, "ray": free_by_ray}
    return min(cluster.nodes, asked[cluster.live](cluster)) if cluster.live else cluster.free


def free_by_nodes(cluster: Cluster) -> int:
    """Ready nodes of the cluster's kind that have as many free GPUs as the job needs."""
    nodes = _kubectl(cluster, "get", "nodes")["items"]
    running = "status.phase!=Succeeded,status.phase!=Failed"
    taken: Counter[str] = Counter()
    for pod in _kubectl(cluster, "get", "pods", "--all-namespaces", f"--field-selector={running}")["items"]:
        for container in pod["spec"].get("containers", []):
            requests = container.get("resources", {}).get("requests", {})
            taken[pod["spec"].get("nodeName", "")] += int(requests.get(GPU_RESOURCE, 0))
    count = 0
    for node in nodes:
        status, metadata = node["status"], node["metadata"]
        says = {one["type"]: one["status"] for one in status.get("conditions", [])}
        is_usable = says.get("Ready") == "True" and not node["spec"].get("unschedulable")
        free = int(status.get("allocatable", {}).get(GPU_RESOURCE, 0)) - taken[metadata["name"]]
        count += is_usable and _is_of(cluster, metadata.get("labels", {})) and free >= cluster.gpus
    return count


def _is_of(cluster: Cluster, labels: Mapping[str, str], *, complete: bool = True) -> bool:
    """True for nodes that the job's pods may run on; a list that is not ``complete`` may leave labels out."""
    named = node_selector(cluster.settings)  # as the manifest asks for them
    wanted: dict[str, tuple[str, ...]] = {label: (value,) for label, value in named.items()}
    if not named and cluster.gpu != "cpu":
        wanted = {PRODUCT_LABEL: products(cluster.gpu)}
    return all(
        labels[label] in values if label in labels else not complete for label, values in wanted.items()
    )


def free_by_kueue(cluster: Cluster) -> int:
    """Whole nodes of GPUs in the quota of the job's queue that no workload has reserved."""
    settings = cluster.settings
    if not settings.queue:
        raise HardwareError(f"cluster {cluster.name}: live: kueue needs job.queue", hint="job: {queue: NAME}")
    namespace = ["--namespace", settings.namespace] if settings.namespace else []
    local = _kubectl(cluster, "get", "localqueues.kueue.x-k8s.io", settings.queue, *namespace)
    queue = _kubectl(cluster, "get", "clusterqueues.kueue.x-k8s.io", local["spec"]["clusterQueue"])
    free: Counter[str] = Counter()
    for group in queue["spec"].get("resourceGroups", []):
        for flavor in group["flavors"]:
            free[flavor["name"]] += _gpus(flavor, "nominalQuota")
    for flavor in queue.get("status", {}).get("flavorsReservation", []):
        free[flavor["name"]] -= _gpus(flavor, "total")
    labels = {
        flavor["metadata"]["name"]: flavor.get("spec", {}).get("nodeLabels", {})
        for flavor in _kubectl(cluster, "get", "resourceflavors.kueue.x-k8s.io")["items"]
    }
    return sum(
        max(0, count) // cluster.gpus
        for name, count in free.items()
        if _is_of(cluster, labels.get(name, {}), complete=False)
    )


def _gpus(flavor: dict[str, Any], count: str) -> int:
    return sum(int(each[count]) for each in flavor["resources"] if each["name"] == GPU_RESOURCE)


def free_by_slurm(cluster: Cluster) -> int:
    """Idle nodes of the job's partition, each once, whose GPUs are of the cluster's kind and enough."""
    partition = ["--partition", cluster.settings.queue] if cluster.settings.queue else []
    said = _answer(cluster, ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N %G", *partition])
    nodes = dict(line.split(maxsplit=1) for line in said.splitlines() if " " in line.strip())
    free = 0
    for generic in nodes.values():  # such as gpu:h100:8(S:0-1),shard:4
        found = re.findall(r"(?:^|,)gpu:(?:([^,:(]+):)?(\d+)", generic)
        count = sum(int(count) for kind, count in found if not _is_another_card(kind, cluster.gpu))
        free += cluster.gpu == "cpu" or count >= cluster.gpus
    return free


def _is_another_card(kind: str, gpu: str) -> bool:
    """True where ``kind``, a site's or Ray's word for a card (``h100``, ``A100-80G``), is not the card ``gpu``."""
    word = kind.lower().replace("_", "-")
    named = {card.gpu.name for card in known_cards() if card.key == word}
    with suppress(HardwareError):
        named.add(find_gpu(word).name)
    return bool(named) and gpu not in named and not gpu.startswith(f"{word}-")


def free_by_ray(cluster: Cluster) -> int:
    """Nodes with enough free GPUs in the Ray cluster of RAY_ADDRESS or of this machine."""
    ray = loaded_ray(f"cluster {cluster.name}: live: ray")
    from ray.util import placement_group, remove_placement_group

    was_connected = ray.is_initialized()
    try:
        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HardwareError(
            f"cluster {cluster.name}: no Ray cluster answers: {first_line(error)}",
            hint="RAY_ADDRESS=HOST:PORT, or leave --live out",
        ) from None
    prefix = "accelerator_type:"
    kinds = [name for name in ray.cluster_resources() if name.startswith(prefix)]
    wanted = [kind for kind in kinds if not _is_another_card(kind.removeprefix(prefix), cluster.gpu)]
    amount = {"CPU": 1.0} if cluster.gpu == "cpu" else {"GPU": float(cluster.gpus)}
    # All GPUs of a node are set aside at once, and given back: Ray's public API tells what is free in the whole cluster
    # alone, where eight nodes with one GPU would be a node of eight.
    groups = [
        placement_group([{**amount, **({kind: 0.001} if kind else {})}])
        for kind in wanted or ([] if kinds else [""])
        for _ in range(cluster.nodes)
    ]
    try:
        seconds = [_PLACING_SECONDS, *[0.1] * (len(groups) - 1)]
        return sum(group.wait(limit) for group, limit in zip(groups, seconds, strict=False))
    finally:
        for group in groups:
            remove_placement_group(group)
        if not was_connected:
            ray.shutdown()


def _kubectl(cluster: Cluster, *words: str) -> dict[str, Any]:
    context = cluster.settings.context
    command = ["kubectl", *(["--context", context] if context else []), *words, "--output=json"]
    found: dict[str, Any] = _answer(cluster, command, read=json.loads)
    return found


def _answer(cluster: Cluster, command: list[str], *, read: Callable[[str], Any] = str) -> Any:
    """``read`` of the command's output. Raises HardwareError where it is missing, fails or takes too long."""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
        if not ended.returncode:
            return read(ended.stdout)
        why = (ended.stderr.strip().splitlines() or ["it failed"])[-1]
    except FileNotFoundError:
        why = f"there is no program {command[0]} here"
    except subprocess.TimeoutExpired:
        why = f"no answer in {_SECONDS:g} s"
    except ValueError:
        why = "it did not answer in JSON"
    raise HardwareError(
        f"cluster {cluster.name} cannot be asked what is free: {' '.join(command[:4])} …: {why}",
        hint="free: in the fleet file, and no --live",
    )
