"""Pins on sharding and offload that contradict each other or the hardware."""

from fitune.errors import RecipeError
from fitune.spec.hardware import Hardware
from fitune.spec.recipe import Recipe


def refuse_spreads(recipe: Recipe, hardware: Hardware) -> None:
    """Raises RecipeError for the first that cannot be honoured."""
    _refuse_sharding(recipe, hardware)
    _refuse_in_backward(recipe, hardware)
    _refuse_uneven_batch(recipe, hardware)
    _refuse_offload(recipe, hardware)
    _refuse_nvme(recipe, hardware)


def _refuse_sharding(recipe: Recipe, hardware: Hardware) -> None:
    ranks = hardware.num_gpus
    if ranks == 1 and recipe.zero:
        raise RecipeError(
            f"zero = {recipe.zero} divides states over the ranks, and there is 1 process: nothing to divide",
            hint="gpus: 2 or more; or leave zero out, and offload_optimizer: cpu frees the device, too",
        )
    if ranks == 1 and recipe.backend is not None:
        raise RecipeError(
            f"backend = {recipe.backend} is for several devices, and there is 1",
            hint="gpus: 2, or no backend",
        )
    if recipe.hybrid_sharding and (hardware.nodes == 1 or hardware.gpus_per_node == 1):
        raise RecipeError(
            f"hybrid_sharding divides within each node and repeats that on every node, and there are "
            f"{hardware.nodes} × {hardware.gpus_per_node}",
            hint="nodes: 2 or more with gpus: 2 or more in each, or no hybrid_sharding",
        )
    if recipe.hybrid_sharding and (recipe.backend == "deepspeed" or recipe.zero in (0, 1)):
        raise RecipeError("hybrid_sharding is done by FSDP2 at stages 2 and 3", hint="backend: fsdp, zero: 3")
    if recipe.zero == 0 and recipe.backend is not None:
        raise RecipeError(
            f"zero: 0 is DDP, which needs no backend, and backend = {recipe.backend}", hint="zero: 1, 2 or 3"
        )
    if recipe.tuning in ("lomo", "adalomo") and ranks > 1 and recipe.zero in (0, 1, 2):
        raise RecipeError(
            f"tuning: {recipe.tuning} on {ranks} devices updates each rank's share of the weights in backward, "
            f"which is stage 3, not zero = {recipe.zero}",
            hint="zero: 3, or tuning: full",
        )


def _refuse_in_backward(recipe: Recipe, hardware: Hardware) -> None:
    if not recipe.optimizer_in_backward or recipe.tuning in ("lomo", "adalomo"):
        return
    if hardware.num_gpus > 1:
        raise RecipeError(
            f"optimizer_in_backward uses a gradient before it could be summed over {hardware.num_gpus} devices",
            hint="gpus: 1; or leave it out, and zero: 2 or 3 divides the gradients",
        )
    for name in ("offload_optimizer", "offload_parameters"):
        place = getattr(recipe, name)
        if place in ("cpu", "nvme"):
            raise RecipeError(
                f"optimizer_in_backward steps weights on the device, and {name} = {place} steps them on the host, "
                "where gradients go block by block anyway",
                hint=f"keep one of the two: no {name}, or no optimizer_in_backward",
            )


def _refuse_uneven_batch(recipe: Recipe, hardware: Hardware) -> None:
    whole, ranks = recipe.global_batch_size, hardware.num_gpus
    if whole is None or ranks == 1:
        return
    each = (recipe.micro_batch_size or 1) * (recipe.gradient_accumulation_steps or 1)
    if whole % (ranks * each):
        terms = [f"{ranks} devices"]
        terms += [f"micro_batch_size {recipe.micro_batch_size}"] if recipe.micro_batch_size else []
        terms += (
            [f"gradient_accumulation_steps {recipe.gradient_accumulation_steps}"]
            if recipe.gradient_accumulation_steps
            else []
        )
        raise RecipeError(
            f"global_batch_size {whole} cannot be shared evenly: {whole} / ({' × '.join(terms)}) = "
            f"{whole / (ranks * each):.2f}",
            hint=f"global_batch_size: {-(-whole // (ranks * each)) * ranks * each}",
        )


def _refuse_offload(recipe: Recipe, hardware: Hardware) -> None:
    places = {
        "offload_parameters": recipe.offload_parameters,
        "offload_optimizer": recipe.offload_optimizer,
        "offload_activations": recipe.offload_activations,
    }
    asked = {name: place for name, place in places.items() if place in ("cpu", "nvme")}
    if not asked:
        return
    name, place = next(iter(asked.items()))
    if hardware.gpu.is_cpu:
        raise RecipeError(
            f"{name} = {place}, and the device is the processor: there is nowhere else to go",
            hint=f"no {name}, or gpu: NAME to plan for a GPU",
        )
    states = [name for name in ("offload_parameters", "offload_optimizer") if name in asked]
    if states and recipe.zero == 0 and hardware.num_gpus > 1:
        raise RecipeError(
            f"{states[0]} = {asked[states[0]]}, and zero: 0 (DDP) keeps everything on every device",
            hint="zero: 3; below it only DeepSpeed offloads, the optimizer alone",
        )
    if "offload_parameters" in asked and hardware.num_gpus > 1 and recipe.backend == "deepspeed":
        _refuse_whole_parameters(recipe)


def _refuse_whole_parameters(recipe: Recipe) -> None:
    if recipe.zero in (1, 2):
        raise RecipeError(
            f"offload_parameters = {recipe.offload_parameters}, and DeepSpeed keeps weights on the device at "
            f"zero = {recipe.zero}",
            hint="zero: 3",
        )


def _refuse_nvme(recipe: Recipe, hardware: Hardware) -> None:
    places = (recipe.offload_parameters, recipe.offload_optimizer, recipe.offload_activations)
    if "nvme" not in places:
        return
    states = "nvme" in places[:2]
    if states and (recipe.backend == "fsdp" or recipe.zero in (0, 1, 2) or hardware.num_gpus == 1):
        raise RecipeError(
            "weights and optimizer wait on NVMe with DeepSpeed at stage 3 only, on two devices or more",
            hint="gpus: 2 or more, zero: 3, backend: deepspeed; or cpu in place of nvme",
        )
    if not recipe.nvme_path:
        raise RecipeError(
            "something is to be offloaded to NVMe, and no folder for it is named", hint="nvme_path: /mnt/nvme"
        )
