"""Finds out whether this process is one of several: from what torchrun, SLURM or MPI say in its environment."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fitune.engine.ranks import ALONE, WAIT, Ranks
from fitune.errors import HardwareError

MEETING = timedelta(minutes=10)
"""Longest wait for all ranks to be there, as long as that of several nodes for each other (launch/nodes.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables by which a launcher tells each process who it is."""

    name: str
    rank: str
    world: str
    local: str


_LAUNCHERS = (
    Launcher(name="torchrun", rank="RANK", world="WORLD_SIZE", local="LOCAL_RANK"),
    # Of the step, not of the job: a batch script that is no task of srun has the job's variables, too.
    Launcher(name="srun", rank="SLURM_PROCID", world="SLURM_STEP_NUM_TASKS", local="SLURM_LOCALID"),
    Launcher(
        name="mpirun", rank="OMPI_COMM_WORLD_RANK", world="OMPI_COMM_WORLD_SIZE", local="OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    Launcher(name="mpirun", rank="PMI_RANK", world="PMI_SIZE", local="MPI_LOCALRANKID"),
)  # fmt: skip


def launched_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """This process as its launcher describes it; ALONE without one. Raises HardwareError for numbers that cannot be."""
    launcher = _launcher(environment)
    if launcher is None:
        return ALONE
    rank, world = _number(launcher.rank, environment), _number(launcher.world, environment)
    local = _number(launcher.local, environment) if launcher.local in environment else 0
    if rank >= world:
        raise HardwareError(
            f"{launcher.rank} is {rank}, and {launcher.world} is {world}: ranks are counted from 0",
            hint=f"start every process by {launcher.name}",
        )
    return Ranks(rank=rank, world=world, local=local)


def _launcher(environment: Mapping[str, str]) -> Launcher | None:
    for launcher in _LAUNCHERS:
        if environment.get(launcher.world, "1") != "1":
            return launcher
    return None


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise HardwareError(f"{name} is {text!r}, not a number", hint="start by torchrun, srun or mpirun")
    return int(text)


def meeting_point(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT where a launcher does not set them: the first node of a SLURM step, this machine for
    MPI; a port that differs between jobs.

    Raises HardwareError where MPI has several machines: it does not say which is the first.
    """
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return {}
    if "SLURM_STEP_NUM_TASKS" in environment:
        host = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
        job = int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
    else:
        world = environment.get("OMPI_COMM_WORLD_SIZE", "")
        if "MASTER_ADDR" not in environment and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", world) != world:
            raise HardwareError(
                "mpirun started processes on several machines, and MASTER_ADDR does not say where rank 0 is",
                hint="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …",
            )
        host, job = "127.0.0.1", os.getppid()  # mpirun starts all processes of one machine itself
    return {
        "MASTER_ADDR": environment.get("MASTER_ADDR", host),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + job % 20_000)),
    }


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: ``gpu[03-07,9],login`` begins with gpu03."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if found is None:
        raise HardwareError(
            f"the node list {nodes!r} names no machine", hint="set MASTER_ADDR and MASTER_PORT"
        )
    return found[1] + (found[2] or "")


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Inside, the processes of one launcher are a group: NCCL between GPUs, gloo between processors."""
    ranks = launched_ranks()
    if ranks.is_alone or dist.is_initialized():
        yield ranks
        return
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(ranks.local)
    _join(ranks, "cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _join(ranks: Ranks, backend: str) -> None:
    """Raises HardwareError when the ranks cannot meet."""
    os.environ.update(meeting_point(os.environ))
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, *_ = next(iter(dist.rendezvous("env://", ranks.rank, ranks.world, timeout=MEETING)))
        store.set_timeout(WAIT)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=WAIT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise HardwareError(
                f"the port of {where} is taken, so the {ranks.world} ranks cannot meet there",
                hint="another MASTER_PORT; or end the job that has it",
            ) from error
        raise HardwareError(
            f"rank {ranks.rank} of {ranks.world} did not meet the others at {where}: {str(error).splitlines()[0]}",
            hint="were all ranks started, and can every machine reach that address?",
        ) from error
