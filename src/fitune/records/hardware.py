"""The devices a row names."""

import re
from dataclasses import replace

from fitune.errors import HardwareError
from fitune.records.row import Row
from fitune.spec.gpus import find_gpu, hardware_for
from fitune.spec.hardware import Gpu, Hardware
from fitune.units import GIB

GPUS_PER_NODE = 8
"""Of the machines that published runs with more devices come from, unless they say otherwise."""

_NODES = re.compile(r"(\d+) nodes? x (\d+)")
_NETWORK = re.compile(r"(\d+) ?gbps")
_USABLE = re.compile(r"(\d+(?:\.\d+)?) ?gib usable")
_COUNT = re.compile(r"^\d+ ?[x×] ?")
_STAND_IN = "a100-80gb"


_OLD_BOARD = 8e9
"""PCIe 3.0 at 8 lanes, bytes/s: what an older desktop board gives each of two cards."""


def hardware_of(row: Row) -> Hardware:
    """Raises HardwareError for a device that is not known."""
    gpus = row.size("n_gpus") or 1
    named = _NODES.search(row.words["sharding"])
    nodes = int(named.group(1)) if named else -(-gpus // GPUS_PER_NODE)
    network = _NETWORK.search(row.words["gpu"])
    return hardware_for(
        gpu=_with_links(row, _gpu(row)),
        gpus=gpus // nodes,
        nodes=nodes,
        internode_bandwidth=float(network.group(1)) * 1e9 / 8 if network else _usual_network(row),
    )


def _with_links(row: Row, gpu: Gpu) -> Gpu:
    """The board that the row describes."""
    if not row.says("gpu", "old motherboard"):
        return gpu
    own_link = gpu.link_bandwidth > gpu.host_bandwidth
    return replace(
        gpu, host_bandwidth=_OLD_BOARD, link_bandwidth=gpu.link_bandwidth if own_link else _OLD_BOARD
    )


def _usual_network(row: Row) -> float:
    """Bytes/s of a node, where a row does not say: an adapter for each device, as NVIDIA's reference designs have it.

    A100: 8 × 200 Gbit/s (DGX A100 data sheet), H100 and newer: 8 × 400 Gbit/s (DGX H100 data sheet); else 100 Gbit/s.
    """
    gpu = _gpu(row)
    if gpu.link_bandwidth <= gpu.host_bandwidth:
        return 12.5e9
    return GPUS_PER_NODE * (
        50e9 if gpu.capability >= (9, 0) else 25e9 if gpu.capability >= (8, 0) else 1.5625e9
    )


def device_is_named(row: Row) -> bool:
    """Some accounts are of bytes alone: they can be held against bytes, not against a device's size or speed."""
    return not row.says("gpu", "unspecified", "unknown") and bool(row.words["gpu"])


def device_bytes(row: Row) -> int:
    """What its author says can be used, else what the driver reports."""
    usable = _USABLE.search(row.words["gpu"])
    return int(float(usable.group(1)) * GIB) if usable else _gpu(row).memory_bytes


def _gpu(row: Row) -> Gpu:
    """By the words before any bracket. A product of two sizes: the smaller that holds what was measured."""
    if not device_is_named(row):
        return find_gpu(_STAND_IN)
    name = _COUNT.sub("", row.words["gpu"].split("(")[0].strip()).replace("a6000 ada", "6000 ada")
    try:
        return find_gpu(name)
    except HardwareError as error:
        sized = [_found(choice) for choice in (error.hint or "").split(" or ")]
        choices = sorted((gpu for gpu in sized if gpu), key=lambda gpu: gpu.memory_bytes)
        if not choices:
            raise
        holding = [gpu for gpu in choices if gpu.memory_bytes >= (row.peak_mem_gib or 0) * GIB]
        return holding[0] if holding and row.peak_mem_gib else choices[-1]


def _found(name: str) -> Gpu | None:
    try:
        return find_gpu(name)
    except HardwareError:
        return None
