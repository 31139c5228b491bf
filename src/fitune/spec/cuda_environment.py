"""Settings that CUDA and torch's allocator read from the environment when a process first uses a GPU."""

import os
import sys
from collections.abc import Mapping, MutableMapping

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""For CUDA torch 2.9.1 reads the second alone, and warns of it where the first is not set; 2.13 reads both."""
_HIP_ALLOCATOR = "PYTORCH_HIP_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:True"


def set_cuda_environment(
    environment: MutableMapping[str, str] = os.environ, *, system: str = sys.platform
) -> None:
    """Number GPUs as NVML does and let torch's segments grow, in this process and those that it starts; what the user
    set stays.

    Plans count on segments that grow: without them rows of mixed lengths lose up to half of what moves. They exist on
    Linux alone, and torch warns elsewhere.
    """
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if system == "linux" and not any(name in environment for name in (*_ALLOCATOR, _HIP_ALLOCATOR)):
        environment.update(dict.fromkeys(_ALLOCATOR, _EXPANDABLE))


def has_growing_segments(environment: Mapping[str, str] = os.environ, *, system: str = sys.platform) -> bool:
    """False if a training that is started here would have segments of fixed sizes: on Windows, or where the user's own
    setting of the allocator does not ask for those that grow. A plan made on a Mac is for a machine with Linux."""
    words = [environment[name] for name in (*_ALLOCATOR, _HIP_ALLOCATOR) if environment.get(name)]
    asked = not words or any(_EXPANDABLE.lower() in each.replace(" ", "").lower() for each in words)
    return asked and system != "win32"


def without_expandable_segments(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` without our setting of the allocator: vLLM's all-reduce shares memory between processes, which
    segments that grow do not allow."""
    is_ours = all(environment.get(name) == _EXPANDABLE for name in _ALLOCATOR)
    return {name: value for name, value in environment.items() if not (is_ours and name in _ALLOCATOR)}
