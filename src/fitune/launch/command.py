"""Words and environment that the ranks of a plan are started with. Nothing is started here."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitune.errors import HardwareError
from fitune.launch.nodes import meeting_address
from fitune.spec.plan import Plan

MEETING_EXAMPLE = "HOST:PORT"
"""Placeholder that ``fitune launch`` prints for --rendezvous when none is given."""


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


def machine_commands(plan: Plan, words: Sequence[str], *, rendezvous: str) -> list[MachineCommand]:
    """The command for each machine of a plan; ``words`` follow ``fitune train``.

    Several start their ranks themselves and meet at ``rendezvous``: an address of the first and a free port there. One
    is started by torchrun, as ``fitune train`` alone does.
    """
    if rendezvous != MEETING_EXAMPLE:
        meeting_address(rendezvous)
    hardware, environment = plan.hardware, command_of(plan, ()).environment
    if hardware.nodes == 1:
        start = (
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            str(hardware.gpus_per_node),
            "-m",
            "fitune",
            "train",
        )
        return [MachineCommand(machine=0, words=(*start, *words), environment=environment)]
    return [
        MachineCommand(
            machine=machine,
            words=("fitune", "train", *words, "--node-rank", str(machine), "--rendezvous", rendezvous),
            environment={},
        )
        for machine in range(hardware.nodes)
    ]


def require_one_machine(plan: Plan) -> None:
    """Raises HardwareError for a plan of several machines that says neither which this one is nor where they meet."""
    hardware = plan.hardware
    if hardware.nodes > 1:
        raise HardwareError(
            f"the plan is for {hardware.nodes} machines, and this one was not told which of them it is",
            hint="on each of them: fitune train … --node-rank 0 (then 1, …) --rendezvous HOST:PORT, where HOST is the "
            f"first, with output_dir on a disk that all share; or torchrun --nnodes {hardware.nodes} --nproc-per-node "
            f"{hardware.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m fitune train …",
        )


def command_of(plan: Plan, words: Sequence[str]) -> RankCommand:
    """One process a device."""
    environment = {"OMP_NUM_THREADS": str(plan.hardware.threads_per_process)}
    return RankCommand(words=tuple(words), processes=plan.hardware.gpus_per_node, environment=environment)
