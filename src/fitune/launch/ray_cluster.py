"""A Ray cluster: where it is, reached as a driver, what it has, what is free there, and questions to each node."""

import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fitune.errors import HardwareError, MissingExtra, RecipeError, first_line
from fitune.launch.place import host_and_port
from fitune.units import counted

_REACHING_SECONDS = 5.0
_ASKING_SECONDS = 60.0
"""A node starts a process of its own to answer: seconds where the disk is cold."""
_ROOM_SECONDS = 8.0
_LOOK_SECONDS = 0.5
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STORE_BYTES = 100 * 2**20
"""The object store of a cluster that is started here: only plans and events go through it."""

_SETTINGS = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # ranks go to the folder of the driver instead
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # a worker's end is seen by polling; the others need a moment to say why
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # an elastic group is first asked for on a node that was just lost
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_worker_niceness": "0",  # of a cluster started here: Ray's 15 leave the cores to whatever else runs
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "3",  # after a death the others wait for it in vain
}
"""Ray's settings by environment, unless the user has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlace:
    """Where and on how many workers: between ``fewest`` and ``most``, restarted ``restarts`` times at most."""

    address: str = ""
    """HOST:PORT, ``auto``, or empty: the cluster of RAY_ADDRESS or of this machine, else one that is started."""
    fewest: int
    most: int
    restarts: int = 3

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change between starts."""
        return self.fewest != self.most


def ray_place(*, address: str, workers: str, restarts: int = 3) -> RayPlace:
    """The place that the command line says. Raises RecipeError for one that cannot be."""
    found = re.fullmatch(r"(\d{1,7})(?:\.\.(\d{1,7}))?", workers, re.ASCII)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most:
        raise RecipeError(
            f"--workers {workers[:40]!r} is no number of workers: a whole number from 1 on, or FEWEST..MOST",
            hint="--workers 2, or --workers 2..4",
        )
    _require_address(address, "--ray-address")
    return RayPlace(address=address, fewest=fewest, most=most, restarts=restarts)


def _require_address(address: str, setting: str) -> None:
    """Raises RecipeError for what Ray would take minutes to find wrong, or end in an error of its own."""
    if address.startswith("ray://"):
        raise RecipeError(
            f"{setting} {address} is Ray Client's, which cannot run a trainer from here",
            hint="run fitune on a machine of the cluster with --ray-address auto, or submit it: ray job submit -- "
            "fitune train … --on ray",
        )
    if address not in ("", "auto", "local") and host_and_port(address) is None:
        raise RecipeError(
            f"{setting} {address!r} is no address of a Ray cluster",
            hint="HOST:PORT of its head, e.g. 10.0.0.1:6379; auto on a machine of it",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of a cluster."""

    id: str
    host: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Living nodes of a cluster, and what nobody uses of all of them together."""

    nodes: tuple[Node, ...]
    free: Mapping[str, float]

    @property
    def has_gpus(self) -> bool:
        """True if any node has a whole GPU, free or not."""
        return any(node.resources.get("GPU", 0) >= 1 for node in self.nodes)

    def nodes_for(self, each: Mapping[str, float]) -> tuple["Node", ...]:
        """Nodes that have room for a worker that needs ``each`` when they are idle; a head may be without work."""
        return tuple(node for node in self.nodes if _times(node.resources, each))

    def slots(self, each: Mapping[str, float]) -> list[int]:
        """How many workers that need ``each`` every node has room for when it is idle, the largest first."""
        return sorted((_times(node.resources, each) for node in self.nodes), reverse=True)

    def without(self, ids: Collection[str]) -> "RayCluster":
        """The cluster without the nodes of these ids, which nobody uses any more."""
        gone = [node for node in self.nodes if node.id in ids]
        free = {
            name: amount - sum(node.resources.get(name, 0.0) for node in gone)
            for name, amount in self.free.items()
        }
        return RayCluster(nodes=tuple(node for node in self.nodes if node not in gone), free=free)

    def free_slots(self, each: Mapping[str, float]) -> int:
        """How many workers have room now."""
        return min(sum(self.slots(each)), _times(self.free, each))


def _times(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    return int(min(resources.get(name, 0.0) // amount for name, amount in each.items()))


def loaded_ray(wanted_by: str = "--on ray") -> Any:
    """The module, with ray.train. Raises MissingExtra."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray.train

        import ray
    except ImportError as error:
        raise MissingExtra(wanted_by, extra="ray") from error
    return ray


@contextmanager
def connected(address: str) -> Iterator[RayCluster]:
    """Inside, this process is a driver of the cluster; whatever it started there ends with the block.

    Raises RecipeError for what is no address, HardwareError when nobody answers there, or Ray or Python have another
    version there.
    """
    ray = loaded_ray()
    named = address or os.environ.get("RAY_ADDRESS", "")
    _require_address(named, "--ray-address" if address else "RAY_ADDRESS")
    host, _, port = named.rpartition(":")
    if port.isdecimal():
        try:  # ray.init asks an address that does not answer for half a minute
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHING_SECONDS).close()
        except OSError as error:
            raise HardwareError(
                f"no Ray cluster at {host}:{port}: {error.strerror or error}",
                hint="ray status on its head says the address; the port is the head's (6379 unless set)",
            ) from error
    if ray.is_initialized():  # a caller's cluster, which the caller ends
        yield cluster_now()
        return
    _reach(ray, named)
    try:
        yield cluster_now()
    finally:
        ray.shutdown()


def _reach(ray: Any, named: str) -> None:
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        ray.init(address=named or "auto", **quiet)
    except ConnectionError as error:
        if named:
            raise HardwareError(
                f"no Ray cluster at {named}: {first_line(error)}",
                hint="ray status on its head; where it asks for a token: RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or "
                "~/.ray/auth_token. Without --ray-address a cluster is started for the run alone",
            ) from error
        ray.init(address="local", include_dashboard=False, object_store_memory=_STORE_BYTES, **quiet)
    except RuntimeError as error:  # check_version_info of Ray
        if "mismatch" not in str(error).lower():
            raise
        told = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise HardwareError(
            f"the cluster at {named or 'this machine'} has other versions: {told}",
            hint="the same Ray and Python here and on every node",
        ) from error


def cluster_now() -> RayCluster:
    """The nodes that live at this moment, and what is free on them; the driver must be connected."""
    ray = loaded_ray()
    nodes = tuple(
        Node(id=node["NodeID"], host=node["NodeManagerHostname"], resources=node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    )
    return RayCluster(nodes=nodes, free=ray.available_resources())


def with_room(cluster: RayCluster, place: RayPlace, each: Mapping[str, float]) -> RayCluster:
    """The cluster as it is once the fewest workers have room: what ended a moment ago holds its resources for seconds.

    Raises HardwareError, with what is asked and what is free, where they find none: Ray itself would wait for them
    without an end.
    """
    until = time.monotonic() + _ROOM_SECONDS
    while cluster.free_slots(each) < place.fewest <= sum(cluster.slots(each)) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        cluster = cluster_now()
    idle, free = sum(cluster.slots(each)), cluster.free_slots(each)
    if free >= place.fewest:
        return cluster
    asked = ", ".join(f"{place.fewest * amount:g} {name}" for name, amount in each.items())
    there = ", ".join(
        f"{cluster.free.get(name, 0.0):g} of {sum(n.resources.get(name, 0.0) for n in cluster.nodes):g} {name}"
        for name in each
    )
    later = f"; {idle} when nothing else runs" if idle > free else ""
    hint = f"at most {counted(free, 'worker')} now{later}"
    if not free and "GPU" in each and not cluster.has_gpus:
        hint = "no node of this cluster has a GPU; gpu: cpu trains on cores"
    else:
        hint += f": --workers {free}" if free else "; ray status says who has them"
    raise HardwareError(
        f"{place.fewest} workers ask for {asked}; free on {counted(len(cluster.nodes), 'node')}: {there}",
        hint=hint,
    )


def spread(world: int, slots: Sequence[int]) -> tuple[int, int]:
    """Nodes × workers a node that ``world`` workers are planned for, where nodes have room for ``slots``, and those
    that may come have as much as the largest.

    One node where one has room for all; else as many a node as leave no node with fewer.
    """
    slots = [*slots, *[max(slots, default=1)] * world]
    for each in range(min(world, max(slots)), 1, -1):
        if world % each == 0 and sum(room >= each for room in slots) >= world // each:
            return world // each, each
    return world, 1


def ask_nodes(question: Callable[..., Any], *words: Any) -> dict[str, Any]:
    """The answer of every living node's own process to ``question(*words)``, by node id. Ray lists a node that is lost
    for some seconds more: it has no answer.

    Raises HardwareError for a node that cannot answer.
    """
    ray = loaded_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in cluster_now().nodes:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        task = ray.remote(question).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        asked.append((node, task.remote(*words)))
    answers: dict[str, Any] = {}
    until = time.monotonic() + _ASKING_SECONDS
    for node, answer in asked:
        try:
            answers[node.id] = ray.get(answer, timeout=max(until - time.monotonic(), 1.0))
        except ray.exceptions.TaskUnschedulableError:
            continue  # it was lost a moment ago
        except ray.exceptions.GetTimeoutError as error:
            raise HardwareError(
                f"node {node.host} did not answer within {_ASKING_SECONDS:g} s", hint="ray status"
            ) from error
        except ray.exceptions.RayError as error:
            raise HardwareError(
                f"node {node.host} cannot run fitune: {last_words(error)}",
                hint="install the same fitune, torch and transformers on every node",
            ) from error
    return answers


def last_words(error: Exception) -> str:
    """The last line of Ray's error, which has the traceback of the worker before it."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
