"""The GPUs of this machine, as NVIDIA's driver describes them and CUDA_VISIBLE_DEVICES shows them."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fitune.errors import HardwareError


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """One GPU as the driver describes it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]


def query_gpus() -> tuple[FoundGpu, ...]:
    """Every GPU that the driver lets this process use; nothing when there is no driver.

    Raises HardwareError for a GPU that the driver cannot describe.
    """
    try:
        import pynvml  # about 10 ms: not for those who name a GPU
    except ImportError:
        if shutil.which("nvidia-smi") is None:
            return ()
        raise HardwareError(
            "the GPUs of this machine cannot be listed: nvidia-ml-py is not installed",
            hint="pip install nvidia-ml-py",
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_found_gpus(pynvml))
    finally:
        pynvml.nvmlShutdown()


def _found_gpus(nvml: ModuleType) -> Iterator[FoundGpu]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError_NoPermission:  # counted, but given to another container
            continue
        except nvml.NVMLError as error:
            raise _indescribable(index, error) from None
        try:
            yield _found_gpu(nvml, index, handle)
        except nvml.NVMLError as error:
            raise _indescribable(index, error) from None


def _found_gpu(nvml: ModuleType, index: int, handle: Any) -> FoundGpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return FoundGpu(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        capability=(major, minor),
    )


def _indescribable(index: int, error: Exception) -> HardwareError:
    return HardwareError(
        f"the driver lists GPU {index}, but cannot describe it: {error}",
        hint="name a known one: gpu: rtx-4090",
    )


def visible_gpus(found: tuple[FoundGpu, ...], environment: Mapping[str, str]) -> tuple[FoundGpu, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves: indices or beginnings of UUIDs, up to the first invalid one, as CUDA."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not found:
        return found
    chosen: list[FoundGpu] = []
    for word in (part.strip() for part in wanted.split(",")):
        if word.startswith("MIG-"):
            raise HardwareError(f"CUDA_VISIBLE_DEVICES = {wanted!r}: slices of a GPU (MIG) are not supported")
        match = next((gpu for gpu in found if _is_named(word, gpu)), None)
        if match is None or match in chosen:
            break
        chosen.append(match)
    return tuple(chosen)


def _is_named(word: str, gpu: FoundGpu) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
