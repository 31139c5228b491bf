"""What one rank of a plan is started with: its words and its environment. Nothing is started here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitune.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """``words`` for every rank of one machine, ``processes`` of them, each with ``environment`` beside its own."""

    words: tuple[str, ...]
    processes: int
    environment: Mapping[str, str]


def command_of(plan: Plan, words: Sequence[str]) -> RankCommand:
    """One process a device; they share the cores of a machine equally."""
    processes = plan.hardware.gpus_per_node
    threads = max(1, plan.hardware.cpu_cores // processes) if plan.hardware.cpu_cores else 1
    return RankCommand(words=tuple(words), processes=processes, environment={"OMP_NUM_THREADS": str(threads)})
