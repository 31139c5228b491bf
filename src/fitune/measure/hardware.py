"""Hardware of this machine, found without torch: planning must start in well under a second."""

import dataclasses
import os
from pathlib import Path

from fitune.errors import HardwareError
from fitune.measure.calibrations import device_key, stored_calibration
from fitune.measure.host import cpu_cores, free_disk_bytes, has_bf16_products, host_memory_bytes
from fitune.measure.nvidia import FoundGpu, query_gpus, visible_gpus
from fitune.spec.gpus import cpu_gpu, find_gpu, hardware_for, similar_gpu
from fitune.spec.hardware import Gpu, Hardware
from fitune.units import format_bytes


def resolve_hardware(
    *,
    gpu: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    host_memory_bytes: int | None = None,
    path: Path = Path("."),
) -> Hardware:
    """The hardware a user names, or this machine when no GPU is named.

    ``cpu`` is this machine's processor. Host memory given by the user always wins; for a processor it is
    the device memory too. On this machine ``gpus`` may not exceed what was found. A device that was calibrated
    here counts as measured, also when it is named.
    """
    if gpu is not None and gpu.lower() != "cpu":
        named = find_gpu(gpu)
        return calibrated(
            hardware_for(gpu=named, gpus=gpus, nodes=nodes, host_memory_bytes=host_memory_bytes or 0)
        )
    here = detect_hardware(path=path, use_gpus=gpu is None)
    if gpus > here.gpus_per_node:
        raise HardwareError(
            f"gpus = {gpus}, but this machine has {here.gpus_per_node} × {here.gpu.name}",
            hint="name the GPU to plan for another machine: gpu: rtx-4090",
        )
    host = host_memory_bytes or here.host_memory_bytes
    device = dataclasses.replace(here.gpu, memory_bytes=host) if here.gpu.is_cpu else here.gpu
    wanted = hardware_for(
        gpu=device, gpus=gpus, nodes=nodes, host_memory_bytes=host,
        cpu_cores=here.cpu_cores, nvme_bytes=here.nvme_bytes,
    )  # fmt: skip
    return calibrated(wanted)


def calibrated(hardware: Hardware) -> Hardware:
    """``hardware`` with the rates that were measured of its device on this machine, if they were."""
    found = stored_calibration(device_key(hardware.gpu, cores=hardware.cpu_cores))
    return hardware if found is None else dataclasses.replace(hardware, calibration=found)


def detect_hardware(*, path: Path = Path("."), use_gpus: bool = True) -> Hardware:
    """GPUs that CUDA_VISIBLE_DEVICES leaves, else the processor; host memory, cores and free disk at ``path``.

    Raises HardwareError when the visible GPUs differ: a plan is for devices that are all alike.
    """
    memory, cores = host_memory_bytes(), cpu_cores()
    processor = cpu_gpu(memory_bytes=memory, cores=cores, has_bf16_products=has_bf16_products())
    found = visible_gpus(query_gpus(), os.environ) if use_gpus else ()
    return hardware_for(
        gpu=_one_kind(found) if found else processor,
        gpus=max(1, len(found)),
        host_memory_bytes=memory,
        cpu_cores=cores,
        nvme_bytes=free_disk_bytes(path),
    )


def describe_hardware(hardware: Hardware) -> str:
    """One line for the devices, one for the host."""
    gpu, each = hardware.gpu, " each" if hardware.num_gpus > 1 else ""
    device = f"{hardware.cpu_cores} cores of cpu" if gpu.is_cpu else f"{hardware.gpus_per_node} × {gpu.name}"
    rate, number = (gpu.fp32_flops, "fp32") if gpu.is_cpu else (gpu.fp16_flops, "fp16")
    parts = (
        device if hardware.nodes == 1 else f"{hardware.nodes} nodes of {device}",
        f"{format_bytes(gpu.memory_bytes)}{each}",
        f"{rate / 1e12:,.3g} TFLOP/s {number}",
        f"{gpu.bandwidth / 1e9:,.0f} GB/s",
        *_lacking(gpu),
    )
    return "\n".join(line for line in (", ".join(parts), _describe_host(hardware)) if line)


def _lacking(gpu: Gpu) -> tuple[str, ...]:
    if gpu.is_cpu:
        return ()
    has = {"no bf16": gpu.has_bf16, "no FlashAttention-2": gpu.has_flash_attention}
    return tuple(what for what, there in has.items() if not there)


def _describe_host(hardware: Hardware) -> str:
    parts = (
        f"{hardware.cpu_cores} cores" if hardware.cpu_cores and not hardware.gpu.is_cpu else "",
        f"{format_bytes(hardware.host_memory_bytes)} host memory" if hardware.host_memory_bytes else "",
        f"{format_bytes(hardware.nvme_bytes)} free on disk" if hardware.nvme_bytes else "",
    )
    return "host: " + ", ".join(part for part in parts if part) if any(parts) else ""


def _one_kind(found: tuple[FoundGpu, ...]) -> Gpu:
    kinds = {(gpu.name, gpu.memory_bytes) for gpu in found}
    if len(kinds) > 1:
        raise HardwareError(
            "the GPUs here differ: " + ", ".join(f"{gpu.index}: {gpu.name}" for gpu in found),
            hint=f"choose with CUDA_VISIBLE_DEVICES, for example {found[0].index}",
        )
    return describe_found(found[0])


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
