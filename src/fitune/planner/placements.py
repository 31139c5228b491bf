"""Where the states of a training may be kept: sharding × offload, as far as the recipe leaves it open."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from fitune.spec.hardware import Hardware
from fitune.spec.plan import Ddp, Offload, Place, Sharding, Single, Zero
from fitune.spec.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Over which devices the states are divided, and what leaves them."""

    sharding: Sharding
    offload: Offload

    @property
    def is_plain(self) -> bool:
        """Nothing leaves the device."""
        return self.offload.places == ("device", "device", "device")

    @property
    def states_stay(self) -> bool:
        """Weights and optimizer stay on the device."""
        return self.offload.parameters == self.offload.optimizer == "device"

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Of ways that are equally fast the one with the fewest moving parts is taken."""
        places = [place for place in self.offload.places if place != "device"]
        stage = self.sharding.stage if isinstance(self.sharding, Zero) else 0
        foreign = isinstance(self.sharding, Zero) and self.sharding.backend == "deepspeed"
        return len(places), int(foreign), stage


def every_placement(recipe: Recipe, hardware: Hardware) -> Iterator[Placement]:
    """Every way that the recipe's pins leave open, whether or not it keeps the rules."""
    for sharding in _shardings(recipe, hardware):
        for offload in _offloads(recipe):
            yield Placement(sharding=sharding, offload=offload)


def _shardings(recipe: Recipe, hardware: Hardware) -> Iterator[Sharding]:
    """One process on one device; on several DDP and the stages of ZeRO by both backends."""
    pinned = (recipe.zero, recipe.backend, recipe.hybrid_sharding) != (None, None, None)
    if hardware.num_gpus == 1:
        yield from filter(partial(_is_allowed, recipe), (Single(),))
    if hardware.num_gpus > 1 or pinned:
        yield from filter(partial(_is_allowed, recipe), (Ddp(), *_zeros(recipe, hardware)))


def _zeros(recipe: Recipe, hardware: Hardware) -> Iterator[Zero]:
    for stage in (1, 2, 3):
        for backend in ("fsdp", "deepspeed"):
            yield Zero(stage=stage, backend=backend)
            if recipe.hybrid_sharding or (hardware.nodes > 1 and hardware.gpus_per_node > 1):
                yield Zero(stage=stage, backend=backend, hybrid=True)


def _is_allowed(recipe: Recipe, way: Sharding) -> bool:
    stage, backend, hybrid = 0, None, False
    if isinstance(way, Zero):
        stage, backend, hybrid = way.stage, way.backend, way.hybrid
    return (
        recipe.zero in (None, stage)
        and recipe.backend in (None, backend)
        and recipe.hybrid_sharding in (None, hybrid)
    )


def _offloads(recipe: Recipe) -> Iterator[Offload]:
    """Left open, activations go to the host at most, and states to NVMe only where a folder for them is named."""
    states: tuple[Place, ...] = ("device", "cpu", "nvme") if recipe.nvme_path else ("device", "cpu")
    for parameters in _places(recipe.offload_parameters, states):
        for optimizer in _places(recipe.offload_optimizer, states):
            for activations in _places(recipe.offload_activations, ("device", "cpu")):
                away = "nvme" in (parameters, optimizer, activations)
                yield Offload(
                    parameters=parameters,
                    optimizer=optimizer,
                    activations=activations,
                    nvme_path=recipe.nvme_path if away else "",
                )


def _places(pinned: Place | None, open_to: tuple[Place, ...]) -> tuple[Place, ...]:
    return open_to if pinned is None else (pinned,)
