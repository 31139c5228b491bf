"""The GPUs of this machine, as NVML or else torch describes them and CUDA_VISIBLE_DEVICES shows them."""

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from fitune.errors import HardwareError


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """One GPU as the driver describes it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    taken_bytes: int = 0
    """Held by other programs; 0 where that is not known."""


def gpus_here() -> tuple[FoundGpu, ...]:
    """GPUs that this process may use, those that CUDA_VISIBLE_DEVICES leaves; nothing without a driver.

    Where NVML is missing (a container without the driver's "utility" part), torch is asked. Raises HardwareError for a
    GPU that the driver cannot describe, and for those that neither can list: a machine with GPUs is never taken for a
    processor.
    """
    import pynvml  # about 10 ms: not for those who name a GPU

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _gpus_of_torch(f"NVML cannot be used ({error})") if count_of_driver() else ()
    try:
        found = tuple(_found_gpus(pynvml))
    finally:
        pynvml.nvmlShutdown()
    return visible_gpus(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def count_of_driver() -> int:
    """Visible GPUs by CUDA's own driver, which names none; 0 where there is no driver."""
    count = ctypes.c_int(0)
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return 0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value
    except (OSError, AttributeError):
        return 0


def _gpus_of_torch(why: str) -> tuple[FoundGpu, ...]:
    """GPUs that torch sees, which are the visible ones; ``why``: what is wrong with NVML."""
    try:
        import torch  # seconds: only for those whose GPUs nothing else names

        missing = "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
    except ImportError:
        missing = "torch is not installed"
    if missing:
        raise HardwareError(
            f"this machine has GPUs that cannot be listed: {why}, and {missing}",
            hint="name the GPU to plan for: gpu: rtx-4090; for the processor: gpu: cpu",
        )
    return tuple(gpu_of_torch(index) for index in range(torch.cuda.device_count()))


def gpu_of_torch(index: int) -> FoundGpu:
    """``cuda:index`` as torch describes it."""
    import torch

    found = torch.cuda.get_device_properties(index)
    return FoundGpu(
        index=index, uuid=f"GPU-{found.uuid}", name=found.name, memory_bytes=found.total_memory,
        capability=(found.major, found.minor),
    )  # fmt: skip


def _found_gpus(nvml: ModuleType) -> Iterator[FoundGpu]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError_NoPermission:  # counted, but given to another container
                continue
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            # as nvidia-smi counts: what the driver keeps for itself is not used by others
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            yield FoundGpu(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=nvml.nvmlDeviceGetName(handle),
                memory_bytes=memory.total,
                capability=(major, minor),
                taken_bytes=memory.used,
            )
        except nvml.NVMLError as error:
            raise HardwareError(
                f"the driver lists GPU {index}, but cannot describe it: {error}",
                hint="name a known one: gpu: rtx-4090",
            ) from None


def visible_gpus(found: tuple[FoundGpu, ...], wanted: str | None) -> tuple[FoundGpu, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves: indices or beginnings of UUIDs, up to the first invalid one, as CUDA."""
    if wanted is None or not found:
        return found
    chosen: list[FoundGpu] = []
    for word in (part.strip() for part in wanted.split(",")):
        if word.startswith("MIG-"):
            raise HardwareError(f"CUDA_VISIBLE_DEVICES = {wanted!r}: slices of a GPU (MIG) are not supported")
        is_uuid = word.startswith("GPU-")
        named = [gpu for gpu in found if word == str(gpu.index) or (is_uuid and gpu.uuid.startswith(word))]
        match = named[0] if named else None
        if match is None or match in chosen:
            break
        chosen.append(match)
    return tuple(chosen)


def driver_version() -> str:
    """Version of NVIDIA's driver; "none" where it cannot be asked."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "none"
