"""The rank that torchrun, srun or mpirun gives this process, by its environment; without torch."""

import os
from collections.abc import Mapping

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
