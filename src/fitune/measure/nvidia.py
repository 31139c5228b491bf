"""The GPUs of this machine as the driver lists them, without torch."""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from fitune.errors import HardwareError
from fitune.units import MIB

_NVIDIA_SMI = (
    "nvidia-smi", "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits",
)  # fmt: skip
_NVIDIA_SMI_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGpu:
    """One line of nvidia-smi."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]


def query_gpus() -> tuple[FoundGpu, ...]:
    """What nvidia-smi lists; nothing when there is no driver, or it does not answer in time."""
    if shutil.which(_NVIDIA_SMI[0]) is None:
        return ()
    try:
        answer = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_nvidia_smi(answer.stdout)


def parse_nvidia_smi(text: str) -> tuple[FoundGpu, ...]:
    """Lines of ``index, uuid, name, MiB, capability``. Raises HardwareError for a line that says less."""
    return tuple(_parse_line(line) for line in text.splitlines() if line.strip())


def _parse_line(line: str) -> FoundGpu:
    try:
        index, uuid, name, mib, capability = (part.strip() for part in line.split(","))
        major, minor = capability.split(".")
        return FoundGpu(
            index=int(index),
            uuid=uuid,
            name=name,
            memory_bytes=int(mib) * MIB,
            capability=(int(major), int(minor)),
        )
    except ValueError:
        raise HardwareError(
            f"nvidia-smi reports a GPU that fitune cannot describe: {line.strip()!r}",
            hint="name a known one: gpu: rtx-4090",
        ) from None


def visible_gpus(found: tuple[FoundGpu, ...], environment: Mapping[str, str]) -> tuple[FoundGpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves: indices or beginnings of UUIDs, up to the first invalid one, as CUDA."""
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not found:
        return found
    chosen: list[FoundGpu] = []
    for word in (part.strip() for part in wanted.split(",")):
        if word.startswith("MIG-"):
            raise HardwareError(f"CUDA_VISIBLE_DEVICES = {wanted!r}: slices of a GPU (MIG) are not supported")
        match = next((gpu for gpu in found if _names(word, gpu)), None)
        if match is None or match in chosen:
            break
        chosen.append(match)
    return tuple(chosen)


def _names(word: str, gpu: FoundGpu) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
