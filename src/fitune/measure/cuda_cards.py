"""The GPUs as torch sees them, held against the plan and against what torch was compiled for."""

import torch

from fitune.errors import HardwareError
from fitune.measure.hardware import describe_found
from fitune.measure.nvml import FoundGpu, gpu_of_torch
from fitune.units import format_bytes
from fitune.values.machines.hardware import Gpu

_LESS_MEMORY = 0.95
"""Share of the planned memory from which on a card is taken for the planned one: torch sees 97.5 to 99 % of what NVML
reports (L4: 22,560 of 23,034 MiB), and two kinds of cards differ by more."""

_WHEELS = (
    "install the wheel of torch that has them: for CUDA 12.6 (cu126) up to Volta, for 12.8 or newer (cu128, cu130) "
    "from Blackwell on; pytorch.org/get-started"
)


def require_planned_card(gpu: Gpu, index: int) -> None:
    """Raises HardwareError where torch's GPU ``index`` has less memory or a lower compute capability than the plan's
    ``gpu``, and where torch has no kernels for it."""
    if index >= torch.cuda.device_count():
        raise HardwareError(
            f"the plan needs cuda:{index}, and torch sees {torch.cuda.device_count()} CUDA devices",
            hint="fewer gpus, or check CUDA_VISIBLE_DEVICES",
        )
    found = gpu_of_torch(index)
    if found.capability < gpu.capability or found.memory_bytes < _LESS_MEMORY * gpu.memory_bytes:
        raise HardwareError(
            f"cuda:{index} is {_card_words(found.name, found.capability, found.memory_bytes)}, and the plan is for "
            f"{_card_words(gpu.name, gpu.capability, gpu.memory_bytes)}",
            hint="leave gpu out to plan for what is here, or choose the card with CUDA_VISIBLE_DEVICES (it counts as "
            "nvidia-smi does while CUDA_DEVICE_ORDER is PCI_BUS_ID, as fitune sets it)",
        )
    if why := missing_kernels(found):
        raise HardwareError(why, hint=_WHEELS)


def other_card(gpu: Gpu, index: int) -> str:
    """A line where torch's GPU ``index`` is of another kind than ``gpu``, though large and new enough; else empty."""
    found = gpu_of_torch(index)
    there = describe_found(found)
    if gpu.name in (there.name, there.slower_board) or gpu.slower_board == there.name:
        return ""
    return (
        f"note on gpu: the plan is for {gpu.name}, and cuda:{index} is {found.name}: its speed and memory are others; "
        "without gpu, fitune plans for what is here"
    )


def missing_kernels(found: FoundGpu) -> str:
    """Why the installed torch cannot compute on this GPU; empty where it can."""
    architectures = torch.cuda.get_arch_list()
    if not architectures or any(_runs(architecture, found.capability) for architecture in architectures):
        return ""
    major, minor = found.capability
    return (
        f"torch {torch.__version__} has no kernels for {found.name}: its compute capability is {major}.{minor} "
        f"(sm_{major}{minor}), and torch was compiled for {', '.join(architectures)}"
    )


def torch_problem(found: FoundGpu) -> str:
    """Returns why the installed torch cannot train on this GPU, with what to do; an empty text where it can."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device, though NVML lists {found.name}: the wheel is one for "
            "processors, or the driver is too old for it"
        )
    why = missing_kernels(found)
    return f"{why}; {_WHEELS}" if why else ""


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """True if code for ``sm_86`` runs on the capability: the same major number, the minor no larger; PTX
    (``compute_90``) runs on all that are newer, and ``sm_90a`` on exactly its own."""
    kind, _, number = architecture.partition("_")
    digits = number.rstrip("af")
    if not digits.isdecimal():
        return False
    compiled = divmod(int(digits), 10)
    if number.endswith("a"):
        return compiled == capability
    return compiled <= capability and (kind == "compute" or compiled[0] == capability[0])


def _card_words(name: str, capability: tuple[int, int], memory_bytes: int) -> str:
    """``rtx-4090 (8.9, 23.99 GiB)``."""
    return f"{name} ({capability[0]}.{capability[1]}, {format_bytes(memory_bytes)})"
