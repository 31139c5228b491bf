"""Words and environment that the ranks of a plan are started with. Nothing is started here."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitune.errors import HardwareError
from fitune.spec.plan import Plan

LAUNCHER = "FITUNE_LAUNCHER"
"""Environment of a rank: the process id of the program that started it and speaks to people about signals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """``words`` for every rank of one machine, ``processes`` of them, each with ``environment`` beside its own."""

    words: tuple[str, ...]
    processes: int
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCommand:
    """Command line for one machine: ``words``, with ``environment`` before them."""

    machine: int
    words: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


def machine_commands(
    plan: Plan, words: Sequence[str], *, rendezvous: str = "HOST:PORT"
) -> list[MachineCommand]:
    """The command for each machine of a plan, by torchrun; ``words`` follow ``fitune train``.

    ``rendezvous``: address of the first machine and a free port there. ``fitune train`` alone does the same on one.
    """
    hardware = plan.hardware
    meeting = ["--standalone"]
    if hardware.nodes > 1:
        meeting = ["--nnodes", str(hardware.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous]
    start = ["torchrun", *meeting, "--nproc-per-node", str(hardware.gpus_per_node)]
    environment = command_of(plan, ()).environment
    return [
        MachineCommand(
            machine=machine, words=(*start, "-m", "fitune", "train", *words), environment=environment
        )
        for machine in range(hardware.nodes)
    ]


def require_one_machine(plan: Plan) -> None:
    """Raises HardwareError for a plan of several machines: processes are started here on this one."""
    hardware = plan.hardware
    if hardware.nodes > 1:
        raise HardwareError(
            f"the plan is for {hardware.nodes} machines, and processes are started on this one only",
            hint=f"on each of them: torchrun --nnodes {hardware.nodes} --nproc-per-node {hardware.gpus_per_node} "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT -m fitune train …, with output_dir on a disk that all share",
        )


def command_of(plan: Plan, words: Sequence[str]) -> RankCommand:
    """One process a device; they share the cores of a machine equally."""
    processes = plan.hardware.gpus_per_node
    threads = max(1, plan.hardware.cpu_cores // processes) if plan.hardware.cpu_cores else 1
    return RankCommand(words=tuple(words), processes=processes, environment={"OMP_NUM_THREADS": str(threads)})
