"""Scoring on a Ray cluster: this process reads the rows, writes the shards and grades; engines in actors answer."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from fitune.errors import HardwareError
from fitune.launch.ray_actors import ActorPool
from fitune.launch.ray_cluster import (
    RayCluster,
    RayPlace,
    ask_nodes,
    connected,
    ray_place,
    spread,
    with_room,
)
from fitune.score.asking import ScoringWorker
from fitune.score.engines.opening import choose_device, choose_dtype
from fitune.score.plan import ScorePlan
from fitune.score.run import Elsewhere
from fitune.score.tasks import Answer, Task
from fitune.session.clusters.ray_nodes import (
    facts_of_node,
    own_settings,
    require_paths,
    require_same_versions,
)
from fitune.session.events import Emit, Note, emit_notes
from fitune.units import counted


def place_of_scoring(*, address: str, workers: str) -> RayPlace:
    """The place that the command line says. By default as many workers as have room."""
    return ray_place(address=address, workers=workers or "1..1000000")


@contextmanager
def scoring_on_ray(plan: ScorePlan, place: RayPlace, *, emit: Emit) -> Iterator[tuple[ScorePlan, Elsewhere]]:
    """Yields the plan for the workers' devices, and what answers its groups there, by as many workers of the place's
    range as have room now.

    Raises HardwareError where the cluster cannot be reached, has no room, or its nodes differ, RunDirectoryError where
    a node has not the model.
    """
    with connected(place.address) as cluster:
        each = {"CPU": 1.0, "GPU": 1.0} if cluster.has_gpus else {"CPU": 1.0}
        cluster = with_room(cluster, place, each)
        require_same_versions(ask_nodes(facts_of_node, {}).values())
        require_paths([plan.model, plan.adapter, plan.chat_template])
        workers = min(place.most, cluster.free_slots(each))
        threads = threads_of(cluster, workers, each)
        found = ask_nodes(dtype_of_node)
        kinds = sorted({found[node.id] for node in cluster.nodes_for(each) if node.id in found})
        if len(kinds) > 1:
            raise HardwareError(
                f"the nodes would answer in {' and '.join(kinds)}, and the answers would depend on where a row went",
                hint="a cluster whose nodes all have GPUs of one kind, or none",
            )
        plan = replace(plan, dtype=kinds[0])
        emit(Note(f"{counted(workers, 'worker')} on Ray, {counted(threads, 'thread')} each"))

        def answers(groups: Iterator[list[Task]], look: Callable[[int], None]) -> Iterator[list[Answer]]:
            """Yields the answers of each group in order, from workers on Ray; ``look`` is told rows done."""
            pool: ActorPool[list[Task], list[Answer]] = ActorPool(
                ScoringWorker, (plan, os.getcwd(), own_settings(), threads),
                workers=workers, each=each, restarts=place.restarts, told=emit_notes(emit),
            )  # fmt: skip
            with pool:
                yield from pool.results(groups, look=look)

        yield plan, answers


def threads_of(cluster: RayCluster, workers: int, each: Mapping[str, float]) -> int:
    """OMP_NUM_THREADS where it is set, else a worker's share of the cores of the smallest node."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said):
        return int(said)
    _, beside = spread(workers, cluster.slots(each))
    cores = min(node.resources["CPU"] for node in cluster.nodes_for(each))
    return max(1, int(cores) // beside)


def dtype_of_node() -> str:
    """The data type of answers on this node."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from what asks for none
    return str(choose_dtype(choose_device()))
