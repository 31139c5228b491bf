"""Over how many devices the states are spread, and what leaves the device altogether."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One process, one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """Every device holds everything; gradients are summed in backward (Li et al. 2020, arXiv 2006.15704)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Each device keeps one share of the states (Rajbhandari et al. 2020, arXiv 1910.02054).

    Stage 1 shares masters and optimizer states, 2 also gradients, 3 also weights. ``fsdp`` is torch's fully_shard:
    weights are shares between two steps at every stage; at stage 3 a block's weights exist whole only while it
    works, at 2 from forward to backward, at 1 whole gradients add up too until they are reduced once a step.
    ``hybrid`` shares within a node and repeats that on every node.
    """

    stage: Literal[1, 2, 3]
    backend: Literal["fsdp", "deepspeed"]
    hybrid: bool = False


Sharding = Single | Ddp | Zero

Place = Literal["device", "cpu", "nvme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Where things wait while nothing works on them; ``cpu`` is pinned host memory.

    ``parameters``: the weights, fetched block by block in forward and backward. ``optimizer``: masters and states,
    stepped by the host, and the gradients it steps with. ``activations``: what the blocks keep for backward.
    ``nvme_path`` is the folder for what waits on NVMe; empty when nothing does.
    """

    parameters: Place = "device"
    optimizer: Place = "device"
    activations: Place = "device"
    nvme_path: str = ""

    @property
    def places(self) -> tuple[Place, Place, Place]:
        return self.parameters, self.optimizer, self.activations
