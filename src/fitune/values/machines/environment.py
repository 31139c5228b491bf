"""The environment variables that a process reads and sets: the rank that torchrun, srun or mpirun gives it, and the
settings of CUDA and of torch's allocator, which are read when a process first uses a GPU. Without torch."""

import os
import sys
from collections.abc import Mapping, MutableMapping

from fitune.errors import HardwareError

_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    # Of the step, not of the job: a batch script that is no task of srun has the job's variables, too.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Name of a launcher, and the variables by which it tells each process its rank, how many there are, and its rank on
this machine."""


def launched_as(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """This process' rank, the number of ranks, and its rank on this machine; (0, 1, 0) without a launcher.

    Raises HardwareError for numbers that cannot be.
    """
    for name, of_rank, of_world, of_local in _LAUNCHERS:
        if environment.get(of_world, "1") == "1":
            continue
        rank, world = _number(of_rank, environment), _number(of_world, environment)
        local = _number(of_local, environment) if of_local in environment else 0
        if rank >= world:
            raise HardwareError(
                f"{of_rank} is {rank}, and {of_world} is {world}: ranks are counted from 0",
                hint=f"start every process by {name}",
            )
        return rank, world, local
    return 0, 1, 0


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise HardwareError(f"{name} is {text!r}, not a number", hint="start by torchrun, srun or mpirun")
    return int(text)


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
