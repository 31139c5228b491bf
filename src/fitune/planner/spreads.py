"""How states may be spread: sharding × offload, as far as recipe, method and hardware allow."""

from collections.abc import Iterator
from dataclasses import dataclass

from fitune.planner.families import Family
from fitune.spec.hardware import Hardware
from fitune.spec.plan import (
    AdamW8bit,
    Ddp,
    Full,
    Lomo,
    Offload,
    Place,
    Sharding,
    Single,
    Zero,
    updates_in_backward,
)
from fitune.spec.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Over which devices the states are divided, and what leaves them."""

    sharding: Sharding
    offload: Offload

    @property
    def is_plain(self) -> bool:
        """Nothing leaves the device."""
        return self.offload.places == ("device", "device", "device")

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Of ways that are equally fast the one with the fewest moving parts is taken."""
        places = [place for place in self.offload.places if place != "device"]
        stage = self.sharding.stage if isinstance(self.sharding, Zero) else 0
        foreign = isinstance(self.sharding, Zero) and self.sharding.backend == "deepspeed"
        return len(places), int(foreign), stage


def spreads(recipe: Recipe, family: Family, hardware: Hardware) -> tuple[Spread, ...]:
    """Every way that the recipe's pins, the method and the family's tier allow, the simplest first."""
    found = [
        Spread(sharding=sharding, offload=offload)
        for sharding in shardings(recipe, family, hardware)
        for offload in _offloads(recipe, family, sharding, hardware)
    ]
    return tuple(sorted(found, key=lambda spread: spread.complexity))


def shardings(recipe: Recipe, family: Family, hardware: Hardware) -> tuple[Sharding, ...]:
    """One process; or DDP and the stages of ZeRO by both backends.

    LOMO's gradients are gone before they could be summed over ranks in buckets: it runs alone or with ZeRO-3, where
    each rank updates its share (Lv et al. 2023, arXiv 2306.09782, section 3.2). Other optimizers in backward: alone.
    """
    alone = hardware.num_gpus == 1
    found: list[Sharding] = [Single()] if alone else [Ddp(), *_zeros(hardware)]
    if _steps_in_backward(family) and not alone:
        return ()
    if isinstance(family.tuning, Lomo) and not alone:
        found = [way for way in found if isinstance(way, Zero) and way.stage == 3 and not way.hybrid]
    if isinstance(family.optimizer, AdamW8bit):
        found = [way for way in found if not (isinstance(way, Zero) and way.backend == "deepspeed")]
    return tuple(way for way in found if _is_allowed(recipe, way))


def _steps_in_backward(family: Family) -> bool:
    return isinstance(family.tuning, Full) and updates_in_backward(family.tuning)


def _zeros(hardware: Hardware) -> Iterator[Zero]:
    for stage in (1, 2, 3):
        yield Zero(stage=stage, backend="fsdp")
        yield Zero(stage=stage, backend="deepspeed")
    if hardware.nodes > 1 and hardware.gpus_per_node > 1:
        yield Zero(stage=2, backend="fsdp", hybrid=True)
        yield Zero(stage=3, backend="fsdp", hybrid=True)


def _is_allowed(recipe: Recipe, way: Sharding) -> bool:
    stage, backend, hybrid = 0, None, False
    if isinstance(way, Zero):
        stage, backend, hybrid = way.stage, way.backend, way.hybrid
    return (
        recipe.zero in (None, stage)
        and recipe.backend in (None, backend)
        and recipe.hybrid_sharding in (None, hybrid)
    )


def _offloads(recipe: Recipe, family: Family, sharding: Sharding, hardware: Hardware) -> Iterator[Offload]:
    if hardware.gpu.is_cpu:
        yield Offload()
        return
    places: tuple[Place, ...] = ("device", "cpu", "nvme")
    for parameters, optimizer in states_places(family, sharding):
        if optimizer != "device" and isinstance(family.optimizer, AdamW8bit):
            continue  # its states are stepped by kernels of the device
        for activations in places:
            offload = Offload(
                parameters=parameters,
                optimizer=optimizer,
                activations=activations,
                nvme_path=recipe.nvme_path if "nvme" in (parameters, optimizer, activations) else "",
            )
            if _suits(recipe, offload) and _is_in_tier(family, offload) and _has_a_disk(recipe, offload):
                yield offload


def states_places(family: Family, sharding: Sharding) -> tuple[tuple[Place, Place], ...]:
    """Where weights and optimizer can be with this engine: (parameters, optimizer).

    FSDP2 offloads both together (CPUOffloadPolicy). DeepSpeed offloads the optimizer at every stage, weights at
    stage 3, to NVMe at stage 3 alone. LOMO has no states to offload. A trained weight that waits on the host is
    stepped there; frozen ones can wait while the adapters' optimizer stays.
    """
    lomo, full = isinstance(family.tuning, Lomo), isinstance(family.tuning, Full)
    match sharding:
        case Ddp():
            return (("device", "device"),)
        case Single():
            if _steps_in_backward(family):  # its weights and states are stepped where they are
                return (("device", "device"),)
            if lomo:
                return ("device", "device"), ("cpu", "device")
            streamed: tuple[Place, Place] = ("cpu", "cpu") if full else ("cpu", "device")
            return ("device", "device"), ("device", "cpu"), streamed
        case Zero(backend="fsdp"):
            return ("device", "device"), ("cpu", "device" if lomo else "cpu")
        case Zero(stage=3):
            if lomo:
                return ("device", "device"), ("cpu", "device"), ("nvme", "device")
            return (
                ("device", "device"), ("device", "cpu"), ("device", "nvme"),
                ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"),
            )  # fmt: skip
        case Zero():
            return (("device", "device"),) if lomo else (("device", "device"), ("device", "cpu"))


def _suits(recipe: Recipe, offload: Offload) -> bool:
    """Pins; left open, activations go to the host at most, and nothing to NVMe that a tier on the host can hold.

    Compiled blocks expect tensors where they were.
    """
    return (
        not (recipe.torch_compile and offload != Offload())
        and recipe.offload_parameters in (None, offload.parameters)
        and recipe.offload_optimizer in (None, offload.optimizer)
        and (
            offload.activations == recipe.offload_activations
            or (recipe.offload_activations is None and offload.activations != "nvme")
        )
    )


def _is_in_tier(family: Family, offload: Offload) -> bool:
    on_device = offload.parameters == offload.optimizer == "device"
    return family.tier == "any" or (family.tier == "device") == on_device


def _has_a_disk(recipe: Recipe, offload: Offload) -> bool:
    """NVMe is used when the recipe names a folder for it."""
    return "nvme" not in offload.places or bool(recipe.nvme_path)
