"""The job of a plan: cores, memory, /dev/shm, disk and time to save that its processes need on each node."""

from pathlib import PurePosixPath

from fitune.errors import HardwareError, RecipeError
from fitune.estimate.overhead import checkpoint_copy_bytes, enough_host_bytes
from fitune.recipe.job import Job, JobSettings, job_name
from fitune.units import GIB, MIB, format_bytes, format_rate, format_seconds
from fitune.values.counts import count_parameters
from fitune.values.plan import Plan
from fitune.values.predictions import Estimate, Priced
from fitune.values.words import describe_devices, describe_plan, describe_rates

CPUS_PER_RANK = 4
"""Cores of a process: the step, the reading of rows, NCCL's threads, the writing of a checkpoint. Our assumption."""
CPUS_PER_HOST_OPTIMIZER = 8
"""Cores of a process whose optimizer steps on the host, which is arithmetic of all cores. Our assumption."""
OBJECT_STORE_BYTES = 1 * GIB
"""Ray's store of objects lies in /dev/shm. Training puts only its metrics there."""
NCCL_SHM_BYTES = 512 * MIB
"""/dev/shm of a process: NCCL's buffers to the other processes of its node. Our assumption."""
CACHE_BYTES = 10 * GIB
"""Disk for logs of Ray, compiled kernels and files of libraries. Our assumption."""
STORAGE_BANDWIDTH = 500e6
"""Bytes/s to a file system that all nodes share, where nobody says: our assumption."""
LEAST_GRACE_SECONDS = 60


def job_of(priced: Priced, settings: JobSettings, *, fetches_model: bool, storage_bandwidth: float) -> Job:
    """The job of a plan. Settings win over what the plan needs, but not below it: that raises HardwareError.

    ``fetches_model``: each node fetches the model from the Hub, instead of reading a folder that all share.
    """
    plan, estimate, hardware = priced.plan, priced.estimate, priced.plan.hardware
    shm = _at_least("shm", settings.shm, shm_bytes_of(hardware.gpus_per_node))
    memory = _at_least("memory", settings.memory, memory_bytes(plan, estimate, shm_bytes=shm))
    disk = _at_least("disk", settings.disk, disk_bytes(plan, fetches_model=fetches_model))
    ranks, cores = hardware.gpus_per_node, settings.cpus or cpus(plan)
    if cores < ranks:
        raise HardwareError(
            f"job.cpus = {cores}, and each of the plan's {ranks} processes on a node needs a core",
            hint=f"job.cpus={cpus(plan)}, or leave it out",
        )
    grace = settings.grace or grace_seconds(estimate, storage_bandwidth or STORAGE_BANDWIDTH)
    if grace < (least := estimate.step_seconds + estimate.checkpoint_bytes / 5e9):
        raise RecipeError(
            f"job.grace = {format_seconds(grace)} is shorter than a step and a save: a step takes "
            f"{format_seconds(estimate.step_seconds)}, and a checkpoint has {format_bytes(estimate.checkpoint_bytes)}",
            hint=f"job.grace={round(2 * least) + LEAST_GRACE_SECONDS}s, or leave it out",
        )
    predicted = (
        f"{format_bytes(estimate.peak_bytes)} of {format_bytes(estimate.usable_bytes)} a device, "
        f"{format_bytes(estimate.host_bytes)} of host memory a node, {format_rate(estimate.tokens_per_second)} on "
        f"{describe_devices(hardware)} ({describe_rates(plan)})"
    )
    return Job(
        settings=settings, name=job_name(f"{settings.mount}/{plan.run.output_dir}", asked=settings.name),
        gpu=hardware.gpu.name, gpus=ranks, nodes=hardware.nodes, cpus=cores,
        memory_bytes=memory, shm_bytes=shm, disk_bytes=disk, grace_seconds=grace,
        notes={"plan": describe_plan(plan), "predicted": predicted},
    )  # fmt: skip


def _at_least(name: str, asked: int | None, needed: int) -> int:
    if asked is not None and asked < needed:
        raise HardwareError(
            f"job.{name} = {format_bytes(asked)}, and the plan needs {format_bytes(needed)} on each node",
            hint=f"job.{name}={needed // GIB + 1}GiB, or leave it out",
        )
    return needed if asked is None else asked


def cpus(plan: Plan) -> int:
    """Cores of a node: ranks · (8 where the optimizer steps on the host, else 4)."""
    each = CPUS_PER_HOST_OPTIMIZER if plan.offload.optimizer != "device" else CPUS_PER_RANK
    return plan.hardware.gpus_per_node * each


def shm_bytes_of(ranks: int) -> int:
    """Bytes of /dev/shm that a node's processes need."""
    return OBJECT_STORE_BYTES + ranks * NCCL_SHM_BYTES


def memory_bytes(plan: Plan, estimate: Estimate, *, shm_bytes: int) -> int:
    """Host memory of a node, in whole GiB: what the plan fits into (``enough_host_bytes``) + /dev/shm, whose pages
    count as memory: a process sees the limit of its container as the node's memory.

    The first term holds the processes, what is offloaded into pinned memory and the copy of a checkpoint. On a
    processor the device's bytes are the host's: (peak + copy + 1 GiB) · 8/7 for each process (``usable_bytes``).
    """
    if plan.hardware.gpu.is_cpu:
        each = estimate.peak_bytes + checkpoint_copy_bytes(plan) + GIB
        needed = plan.hardware.gpus_per_node * each * 8 // 7
    else:
        needed = enough_host_bytes(estimate.host_bytes)
    return -(-(needed + shm_bytes) // GIB) * GIB


def disk_bytes(plan: Plan, *, fetches_model: bool) -> int:
    """Disk of a node, in whole GiB: caches, and 2 · P for the files of a model that is fetched from the Hub."""
    fetched = 2 * count_parameters(plan.model).total if fetches_model else 0
    return -(-(CACHE_BYTES + plan.hardware.gpus_per_node * GIB + fetched) // GIB) * GIB


def grace_seconds(estimate: Estimate, storage_bandwidth: float) -> int:
    """Seconds from the request to stop to the kill: 2 · (a step + a save) + a minute, in whole half minutes."""
    saving = estimate.step_seconds + estimate.checkpoint_bytes / storage_bandwidth
    return -(-round(2 * saving + LEAST_GRACE_SECONDS) // 30) * 30


def inside(path: str, mount: str, *, setting: str) -> str:
    """``path`` as the pods see it: below ``mount``. Raises RecipeError for an absolute path somewhere else."""
    if "://" in path:
        return path
    pure = PurePosixPath(path)
    if ".." in pure.parts or path.startswith("~") or (pure.is_absolute() and not pure.is_relative_to(mount)):
        raise RecipeError(
            f"{setting} = {path!r} is not on the shared folder, which pods see at {mount}",
            hint=f"copy it there, and {setting}: {mount}/{pure.name}; or job.mount=FOLDER, where pods see it",
        )
    return str(PurePosixPath(mount) / pure)
