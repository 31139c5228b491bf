"""Lines about where a plan keeps things: devices, sharding, offload, the network; for the lines about all the rest see
decisions.py."""

from collections.abc import Iterator, Sequence

from fitune.estimate.overhead import reserve_bytes, unmeasured_bytes, usable_bytes
from fitune.planner.candidates import Request
from fitune.planner.defaults import HOST_PER_DEVICE_MEMORY
from fitune.planner.fit import OFFLOADED, TIE
from fitune.spec.plan import Ddp, Plan, Zero
from fitune.spec.predictions import Priced
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.rules import keeps_rules
from fitune.spec.words import describe_offload, describe_sharding, method_name
from fitune.units import GIB, format_bytes, format_percent


def devices_left_idle(request: Request, plan: Plan) -> Iterator[str]:
    """A line where the plan does not use all devices that are there."""
    used, there = plan.hardware.num_gpus, request.hardware.num_gpus
    if used < there:
        objective = request.recipe.objective
        yield f"devices: {used} of {there}, because a token costs least on them (objective: {objective})"


def devices_here(recipe: Recipe, request: Request, plan: Plan) -> Iterator[str]:
    """Lines about the GPUs of this machine, where the recipe names none: how many, and what others hold of them."""
    hardware = request.hardware
    if recipe.gpu is not None:
        return
    if hardware.gpu.is_cpu:
        yield "note on gpu: no GPU was found here: planned for the processor; --gpu rtx-4090 plans for a card"
        return
    if recipe.gpus is None and plan.hardware.gpus_per_node == hardware.gpus_per_node > 1:
        yield f"gpus: {hardware.gpus_per_node}, all that are here and of this kind; gpus: 1 keeps one"
    if taken := hardware.taken_bytes:
        total, reserve = hardware.gpu.memory_bytes, reserve_bytes(hardware.gpu) + unmeasured_bytes(hardware)
        yield (
            f"note on memory: other programs hold {format_bytes(taken)} of a GPU (nvidia-smi lists them): usable are "
            f"{format_bytes(total)} - {format_bytes(taken)} - {format_bytes(reserve)} kept free = "
            f"{format_bytes(usable_bytes(hardware))}"
        )


def placement_decisions(recipe: Recipe, chosen: Priced, others: Sequence[Priced]) -> Iterator[str]:
    """Lines about sharding, offload and the network of the chosen plan."""
    yield from _sharding(recipe, chosen.plan)
    yield from _offload(recipe, chosen)
    yield from _staying(recipe, chosen, others)
    yield from _network(recipe, chosen.plan)


def _sharding(recipe: Recipe, plan: Plan) -> Iterator[str]:
    match plan.sharding:
        case Ddp() if recipe.zero is None:
            yield "sharding: DDP, every device holds everything; the fastest that fits"
        case Zero(stage=stage) if recipe.zero is None or recipe.backend is None:
            ways = {
                1: "optimizer states are divided",
                2: "optimizer states and gradients are divided",
                3: "weights, gradients and optimizer states are divided",
            }
            yield (
                f"sharding: {describe_sharding(plan.sharding)}, {ways[stage]} over {plan.hardware.num_gpus} devices; "
                f"the simplest within {format_percent(1 - TIE, digits=0)} of the fastest that fits (DDP, then FSDP2, "
                "then DeepSpeed; lower stages first)"
            )


def _offload(recipe: Recipe, chosen: Priced) -> Iterator[str]:
    """Offload, and whether the host was checked."""
    plan = chosen.plan
    offloaded = describe_offload(plan.offload)
    pins = (recipe.offload_parameters, recipe.offload_optimizer, recipe.offload_activations)
    if offloaded and pins == (None, None, None) and recipe.objective == "least-memory":
        yield f"offload: {offloaded}, which needs least memory on the device"
    elif offloaded and pins == (None, None, None):
        share = format_percent(OFFLOADED, digits=0)
        yield f"offload: {offloaded}; without it nothing fits, or nothing that is {share} as fast"
    is_checked = offloaded or chosen.estimate.usable_host_bytes
    if is_checked and recipe.host_memory is None and recipe.gpu is not None and not plan.hardware.gpu.is_cpu:
        host = plan.hardware.host_memory_bytes
        yield (
            f"note on the host: a node's memory is not known and taken to be {format_bytes(host)}, "
            f"{HOST_PER_DEVICE_MEMORY} × its devices'; if it has another, say so: host_memory: {round(host / GIB)}GiB"
        )


def _staying(recipe: Recipe, chosen: Priced, others: Sequence[Priced]) -> Iterator[str]:
    """An offload that would be faster and is not taken: by how much, and the settings that take it."""
    pins = (recipe.offload_parameters, recipe.offload_optimizer, recipe.offload_activations)
    if pins != (None, None, None) or recipe.objective == "least-memory":
        return
    if describe_offload(chosen.plan.offload):
        return
    speed, tuning = chosen.estimate.tokens_per_second, method_name(chosen.plan.tuning)
    offloading = (
        other
        for other in others
        if describe_offload(other.plan.offload)
        and method_name(other.plan.tuning) == tuning
        and keeps_rules(other.plan, "train")
    )
    best = max(offloading, key=lambda other: other.estimate.tokens_per_second, default=chosen)
    gain = best.estimate.tokens_per_second / speed - 1
    if gain > 1 / TIE - 1:
        places = {
            part: getattr(best.plan.offload, part) for part in ("parameters", "optimizer", "activations")
        }
        settings = ", ".join(
            f"offload_{part}: {where}" for part, where in places.items() if where != "device"
        )
        enough = format_percent(1 / OFFLOADED - 1, digits=0)
        yield (
            f"offload: none; {describe_offload(best.plan.offload)} would be up to {format_percent(gain, digits=0)} "
            f"faster if nothing else uses the links to the host, and is chosen where it gains {enough}; to choose it: "
            f"{settings}"
        )


def _network(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if plan.hardware.nodes > 1 and recipe.node_network is None:
        speed = plan.hardware.internode_bandwidth * 8 / 1e9
        yield f"node_network: {speed:g} Gbit/s between nodes, assumed; it decides what sharding over them costs"
