"""Hardware of this machine, found without torch: planning must start in well under a second."""

import dataclasses
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fitune.errors import HardwareError
from fitune.measure.measurements import device_key, measured_on, quick_key, stored_calibration
from fitune.measure.nvml import FoundGpu, gpus_here
from fitune.units import MIB, format_bytes
from fitune.values.machines.environment import has_growing_segments
from fitune.values.machines.gpus import (
    NODE_NETWORK,
    GpuFigures,
    cpu_gpu,
    find_gpu,
    gpu_of_figures,
    hardware_for,
    shared_host_bytes,
    similar_gpu,
    with_figures,
)
from fitune.values.machines.hardware import Gpu, Hardware

NO_FIGURES = GpuFigures()


def resolve_hardware(
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    host_memory_bytes: int | None = None,
    figures: GpuFigures = NO_FIGURES,
    internode_bandwidth: float | None = None,
) -> Hardware:
    """The hardware a user names, or this machine when no GPU is named.

    ``cpu`` is this machine's processor. Host memory given by the user always wins; for a processor it is
    the device memory too. ``gpus``: None takes one of a named GPU, and all of one kind that are found here. On this
    machine they may not exceed what was found; on its processor they are processes. A device that was calibrated here
    counts as measured, also when it is named. ``figures`` replace those of a named GPU, or describe one without a name.
    """
    network = internode_bandwidth or NODE_NETWORK
    is_cpu = gpu is not None and gpu.lower() == "cpu"
    if not is_cpu and (gpu is not None or figures.describe_a_gpu):
        device = gpu_of_figures(figures) if gpu is None else with_figures(find_gpu(gpu), figures)
        host = host_memory_bytes or (0 if gpu is None else shared_host_bytes(gpu))
        wanted = hardware_for(
            gpu=device, gpus=gpus or 1, nodes=nodes, host_memory_bytes=host, internode_bandwidth=network
        )
        return wanted if figures.describe_a_gpu else calibrated(wanted)
    if figures.describe_a_gpu:
        raise HardwareError(
            "gpu_memory, gpu_flops and gpu_bandwidth describe a CUDA GPU, and gpu is cpu", hint="host_memory"
        )
    here = detect_hardware(use_gpus=gpu is None, most=gpus)
    gpus, device = gpus or here.gpus_per_node, here.gpu
    host = host_memory_bytes or here.host_memory_bytes
    if device.is_cpu:  # several processes share its cores and its memory
        device = cpu_gpu(
            memory_bytes=host // gpus, cores=max(1, here.cpu_cores // gpus), has_bf16_products=has_bf16_products()
        )  # fmt: skip
    elif gpus > here.gpus_per_node:
        raise HardwareError(
            f"gpus = {gpus}, but this machine has {here.gpus_per_node} × {here.gpu.name}",
            hint="name the GPU to plan for another machine: gpu: rtx-4090",
        )
    wanted = hardware_for(
        gpu=with_figures(device, figures), gpus=gpus, nodes=nodes, host_memory_bytes=host,
        cpu_cores=here.cpu_cores, nvme_bytes=here.nvme_bytes, internode_bandwidth=network,
    )  # fmt: skip
    return calibrated(dataclasses.replace(wanted, taken_bytes=here.taken_bytes, left_out=here.left_out))


def calibrated(hardware: Hardware) -> Hardware:
    """``hardware`` with the rates that were measured of its device on this machine, what plans did on its kind, and how
    torch's allocator is set here."""
    key = device_key(hardware.gpu, cores=hardware.threads_per_process, processes=hardware.gpus_per_node)
    found = stored_calibration(key)
    if found is None and hardware.gpu.is_cpu:
        found = stored_calibration(quick_key(key))
    measured = measured_on(key)
    grows = hardware.gpu.is_cpu or has_growing_segments()
    return dataclasses.replace(hardware, calibration=found, measured=measured, growing_segments=grows)


def detect_hardware(*, use_gpus: bool = True, most: int | None = None) -> Hardware:
    """GPUs that CUDA_VISIBLE_DEVICES leaves, else the processor; host memory, cores and free disk here.

    A plan is for devices that are all alike: of several kinds, those with most memory, at most ``most`` of them.
    """
    memory, cores = host_memory_bytes(), cpu_cores()
    processor = cpu_gpu(memory_bytes=memory, cores=cores, has_bf16_products=has_bf16_products())
    found = gpus_here() if use_gpus else ()
    taken = of_one_kind(found)[:most]
    wanted = hardware_for(
        gpu=describe_found(taken[0]) if taken else processor,
        gpus=max(1, len(taken)),
        host_memory_bytes=memory,
        cpu_cores=cores,
        nvme_bytes=free_disk_bytes(Path(".")),
    )
    fullest = max((gpu.taken_bytes for gpu in taken), default=0)
    left_out = Counter(gpu.name for gpu in (*HIDDEN, *found) if gpu not in taken)
    return dataclasses.replace(
        wanted,
        # In whole 128 MiB: a plan is not to change with every window of a desktop. For less the reserve has room.
        taken_bytes=0 if fullest < _TAKEN_STEP else -(-fullest // _TAKEN_STEP) * _TAKEN_STEP,
        left_out=", ".join(f"{count} × {name}" for name, count in left_out.items()),
    )


def of_one_kind(found: Sequence[FoundGpu]) -> tuple[FoundGpu, ...]:
    """The GPUs of the kind with most memory that fitune trains on; of two such kinds, of the newer one."""
    best = max(
        found, key=lambda gpu: (gpu.capability >= _OLDEST, gpu.memory_bytes, gpu.capability), default=None
    )
    return tuple(
        gpu
        for gpu in found
        if best is not None and (gpu.name, gpu.memory_bytes) == (best.name, best.memory_bytes)
    )


_TAKEN_STEP = 128 * MIB
_OLDEST = (7, 0)


def see_one_kind() -> None:
    """Let this process, and those that it starts, see only the GPUs that ``detect_hardware`` takes.

    To be called before torch is imported: bitsandbytes starts CUDA when it is, and from then on CUDA_VISIBLE_DEVICES
    changes nothing. Where all GPUs are of one kind nothing changes.
    """
    found = gpus_here()
    taken = of_one_kind(found)
    if len(taken) < len(found):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in taken)
        HIDDEN.extend(gpu for gpu in found if gpu not in taken)


HIDDEN: list[FoundGpu] = []
"""GPUs that ``see_one_kind`` has hidden from this process: they are still to be named."""


def require_free(hardware: Hardware, needed_bytes: int) -> None:
    """Raises HardwareError where other programs leave less than ``needed_bytes`` of a GPU that is planned with."""
    found = () if hardware.gpu.is_cpu else of_one_kind(gpus_here())
    for gpu in found[: hardware.gpus_per_node]:
        free = gpu.memory_bytes - gpu.taken_bytes
        if needed_bytes > free:
            raise HardwareError(
                f"the plan takes {format_bytes(needed_bytes)} of GPU {gpu.index} ({gpu.name}), and "
                f"{format_bytes(free)} of its {format_bytes(gpu.memory_bytes)} are free: other programs hold "
                f"{format_bytes(gpu.taken_bytes)}",
                hint="leave gpu out to plan with what is free; or end those programs (nvidia-smi lists them)",
            )


def describe_hardware(hardware: Hardware) -> str:
    """One line for the devices, one for the host."""
    gpu, each = hardware.gpu, " each" if hardware.num_gpus > 1 else ""
    device = f"{hardware.cpu_cores} cores of cpu" if gpu.is_cpu else f"{hardware.gpus_per_node} × {gpu.name}"
    rate, number = (gpu.fp32_flops, "fp32") if gpu.is_cpu else (gpu.fp16_flops, "fp16")
    has = {
        "no bf16": gpu.is_cpu or gpu.has_bf16,
        "no FlashAttention-2": gpu.is_cpu or gpu.has_flash_attention,
    }
    devices = (
        device if hardware.nodes == 1 else f"{hardware.nodes} nodes of {device}",
        f"{format_bytes(gpu.memory_bytes)}{each}",
        *([f"{format_bytes(hardware.taken_bytes)} of it taken"] if hardware.taken_bytes else []),
        f"{rate / 1e12:,.3g} TFLOP/s {number}",
        f"{gpu.bandwidth / 1e9:,.0f} GB/s",
        *(lacking for lacking, there in has.items() if not there),
        *([f"not used: {hardware.left_out}"] if hardware.left_out else []),
    )
    host = (
        f"{hardware.cpu_cores} cores" if hardware.cpu_cores and not gpu.is_cpu else "",
        f"{format_bytes(hardware.host_memory_bytes)} host memory" if hardware.host_memory_bytes else "",
        f"{format_bytes(hardware.nvme_bytes)} free on disk" if hardware.nvme_bytes else "",
    )
    lines = [", ".join(devices)]
    if any(host):
        lines.append("host: " + ", ".join(filter(None, host)))
    return "\n".join(lines)


def describe_found(found: FoundGpu) -> Gpu:
    """The table's figures with the memory that was found, or stand-ins for a device it does not have."""
    spelled = f"{found.name} {round(found.memory_bytes / 1024**3)}GB"
    for name in (found.name, spelled):
        try:
            known = find_gpu(name)
        except HardwareError:
            continue
        return dataclasses.replace(known, memory_bytes=found.memory_bytes)
    return similar_gpu(found.name, memory_bytes=found.memory_bytes, capability=found.capability)


_CGROUP = Path("/sys/fs/cgroup")


def host_memory_bytes(*, cgroup: Path = _CGROUP, membership: str | None = None) -> int:
    """Memory of the machine, or of the container when that is less."""
    import psutil

    return min([int(psutil.virtual_memory().total), *memory_limits(cgroup, membership)])


def memory_limits(cgroup: Path, membership: str | None = None) -> list[int]:
    """Limits of the process's own cgroup and of those above it."""
    texts = _limits(cgroup, membership, file="memory.max")
    texts += _limits(cgroup, membership, file="memory.limit_in_bytes", controller="memory")
    return [int(text) for text in texts if text.isdecimal() and int(text) > 0]


def cpu_cores(*, cgroup: Path = _CGROUP, membership: str | None = None) -> int:
    """Cores this process may use: its affinity, or the container's share when that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # "quota period" in microseconds, or "max period" without a limit
    for words in map(str.split, _limits(cgroup, membership, file="cpu.max")):
        if len(words) == 2 and words[0].isdecimal():
            cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(1, cores)


def _limits(cgroup: Path, membership: str | None, *, file: str, controller: str = "") -> list[str]:
    """Returns the text of ``file`` in the process's own cgroup and in each above it. ``membership``: /proc/self/cgroup.

    Its lines are ``0::/path`` (version 2, no controller) or ``4:memory:/path`` (version 1).
    """
    root, limits = cgroup / controller, []
    for line in (_text_of(Path("/proc/self/cgroup")) if membership is None else membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller:
            own = root / path.strip("/")
            limits += [
                _text_of(place / file).strip() for place in (own, *own.parents) if place.is_relative_to(root)
            ]
    return limits


def has_bf16_products(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True where the processor names instructions that multiply bf16: AVX512-BF16, AMX, or Arm's bf16."""
    words = set(_text_of(cpuinfo).lower().split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def free_disk_bytes(path: Path) -> int:
    """Free bytes where ``path`` is, or would be created."""
    existing = next((place for place in (path.absolute(), *path.absolute().parents) if place.exists()), None)
    return shutil.disk_usage(existing).free if existing is not None else 0


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
