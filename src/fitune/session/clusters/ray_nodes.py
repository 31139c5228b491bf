"""The nodes of a Ray cluster beside this machine: versions, hardware, and files that all must have, and the settings
that they are told."""

import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.errors import HardwareError, RunDirectoryError, installed_versions
from fitune.launch.ray_cluster import ask_nodes
from fitune.recipe.recipe import Recipe
from fitune.session.planning import wanted_hardware
from fitune.values.machines.hardware import Hardware

_LIBRARIES = ("fitune", "torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node's answer: its name, the versions of what it runs, and its hardware."""

    host: str
    versions: dict[str, str]
    hardware: dict[int, Hardware | str]
    """By the number of workers; in words where it cannot be had."""


def facts_of_node(shapes: Mapping[int, Recipe]) -> NodeFacts:
    """Versions and hardware of the node whose process runs this."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from what asks for none
    hardware: dict[int, Hardware | str] = {}
    for world, recipe in shapes.items():
        try:
            hardware[world] = wanted_hardware(recipe)
        except HardwareError as error:
            hardware[world] = error.message
    return NodeFacts(host=socket.gethostname(), versions=versions_here(), hardware=hardware)


def own_settings() -> dict[str, str]:
    """Variables of this environment that nodes are told: fitune's own. Keys and tokens are the nodes' own."""
    return {name: value for name, value in os.environ.items() if name.startswith("FITUNE_")}


def versions_here() -> dict[str, str]:
    """Versions of Python and of the libraries that all nodes must share; ``none`` for one that is not installed."""
    return dict.fromkeys(_LIBRARIES, "none") | installed_versions(_LIBRARIES)


def hardware_of_workers(shapes: Mapping[int, Recipe]) -> dict[int, Hardware]:
    """The hardware of the workers, for each number of them. Raises HardwareError where versions differ."""
    answers: dict[str, NodeFacts] = ask_nodes(facts_of_node, dict(shapes))
    require_same_versions(answers.values())
    found: dict[int, Hardware] = {}
    for world in shapes:
        there = [facts.hardware[world] for facts in answers.values()]
        fitting = [hardware for hardware in there if isinstance(hardware, Hardware)]
        if not fitting:
            raise HardwareError(f"no node of the cluster can have {world} workers: {there[0]}")
        found[world] = min(
            fitting, key=lambda hardware: (hardware.gpu.memory_bytes, hardware.host_memory_bytes)
        )
    return found


def require_same(facts: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises HardwareError at the first fact that one of the nodes does not share with the first of them; ``facts`` has
    what each is called and says."""
    first, own = facts[0]
    for node, theirs in facts:
        for name in sorted(own.keys() | theirs.keys()):
            if own.get(name) != theirs.get(name):
                one, other = (repr(each[name]) if name in each else "none" for each in (own, theirs))
                raise HardwareError(
                    f"{name} differs: {one} on {first}, {other} on {node}",
                    hint="the same versions, recipe and options on every node",
                )


def require_same_versions(nodes: Iterable[NodeFacts]) -> None:
    """Raises HardwareError at the first version of this machine that one of the nodes does not have."""
    here = (f"{socket.gethostname()}, where fitune was started", versions_here())
    require_same([here, *((f"node {each.host}", each.versions) for each in nodes)])


def require_shared(directory: Path, paths: Iterable[str]) -> None:
    """Raises RunDirectoryError where a node does not see the run directory, or a path of this machine."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / f".fitune-{uuid.uuid4().hex}.tmp"
    mark.touch()
    try:
        require_paths([str(mark), *paths], mark=str(mark.absolute()))
    finally:
        mark.unlink(missing_ok=True)


def require_paths(paths: Iterable[str], *, mark: str = "") -> None:
    """Raises RunDirectoryError where a node has not a file or folder that this machine has; what is no path here (a Hub
    id) is left out. ``mark``: the one that stands for the run directory."""
    here = [str(Path(path).absolute()) for path in paths if path and Path(path).exists()]
    answers: dict[str, tuple[str, list[str]]] = ask_nodes(missing_here, here)
    missing = sorted((here.index(path), host) for host, paths in answers.values() for path in paths)
    for place, host in missing[:1]:
        if here[place] == mark:
            raise RunDirectoryError(
                f"output_dir {Path(mark).parent} is a folder of {socket.gethostname()} that node {host} does not see",
                hint="a folder that all nodes share (NFS or the like)",
            )
        raise RunDirectoryError(
            f"node {host} has no {here[place]}", hint="put model and data into a folder that all nodes share"
        )


def missing_here(paths: list[str]) -> tuple[str, list[str]]:
    """This machine's name, and those of ``paths`` that it does not have."""
    return socket.gethostname(), [path for path in paths if not os.path.exists(path)]
