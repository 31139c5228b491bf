"""Lines about what a plan holds and where: devices, sharding, offload, the network; adapters, added tokens, dropout.
All the rest is in decisions.py."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fitune.estimate.overhead import reserve_bytes, unmeasured_bytes, usable_bytes
from fitune.estimate.parameters import trained_parameters
from fitune.estimate.predict import predict_memory, predict_step_time
from fitune.planner.candidates import Request
from fitune.planner.defaults import HOST_PER_DEVICE_MEMORY
from fitune.planner.fit import OFFLOADED, TIE
from fitune.recipe.recipe import Recipe
from fitune.units import GIB, as_ranges, format_bytes, format_count, format_percent
from fitune.values.counts import trained_tables, untouched_blocks
from fitune.values.model.model_spec import NO_DROPOUT
from fitune.values.model.traits import falls_back_to_scores
from fitune.values.plan import Ddp, Dense, Lora, Plan, Zero
from fitune.values.predictions import Priced
from fitune.values.quantisers import is_packed
from fitune.values.rules import keeps_rules
from fitune.values.words import describe_dropout, describe_offload, describe_sharding, method_name

NO_GPU, HOST_ASSUMED = "note on gpu: no GPU", "note on the host"
"""The first words of two notes. The first screen shows their facts elsewhere, and leaves these notes out."""


def devices_here(asked: Recipe, request: Request, plan: Plan) -> Iterator[str]:
    """Lines about devices that are not used; and, where the recipe names none, about those of this machine: how many,
    and what others hold of them."""
    hardware, used = request.hardware, plan.hardware.num_gpus
    if used < hardware.num_gpus:
        objective = request.recipe.objective
        yield f"devices: {used} of {hardware.num_gpus}, because a token costs least on them (objective: {objective})"
    if asked.gpu is not None:
        return
    if hardware.gpu.is_cpu:
        yield f"{NO_GPU} was found here: planned for the processor; --gpu rtx-4090 plans for a card"
        return
    if asked.gpus is None and plan.hardware.gpus_per_node == hardware.gpus_per_node > 1:
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
    plan, hardware = chosen.plan, chosen.plan.hardware
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
                f"sharding: {describe_sharding(plan.sharding)}, {ways[stage]} over {hardware.num_gpus} devices; "
                f"the simplest within {format_percent(1 - TIE, digits=0)} of the fastest that fits (DDP, then FSDP2, "
                "then DeepSpeed; lower stages first)"
            )
    offloaded = describe_offload(plan.offload)
    pins = (recipe.offload_parameters, recipe.offload_optimizer, recipe.offload_activations)
    is_open, is_least = pins == (None, None, None), recipe.objective == "least-memory"
    if offloaded and is_open:
        share = format_percent(OFFLOADED, digits=0)
        why = f"; without it nothing fits, or nothing that is {share} as fast"
        yield f"offload: {offloaded}{', which needs least memory on the device' if is_least else why}"
    is_checked = offloaded or chosen.estimate.usable_host_bytes
    if is_checked and recipe.host_memory is None and recipe.gpu is not None and not hardware.gpu.is_cpu:
        host = hardware.host_memory_bytes
        yield (
            f"{HOST_ASSUMED}: a node's memory is not known and taken to be {format_bytes(host)}, "
            f"{HOST_PER_DEVICE_MEMORY} × its devices'; if it has another, say so: host_memory: {round(host / GIB)}GiB"
        )
    if is_open and not is_least and not offloaded:
        yield from _offload_not_taken(chosen, others)
    if hardware.nodes > 1 and recipe.node_network is None:
        speed = hardware.internode_bandwidth * 8 / 1e9
        yield f"node_network: {speed:g} Gbit/s between nodes, assumed; it decides what sharding over them costs"


def _offload_not_taken(chosen: Priced, others: Sequence[Priced]) -> Iterator[str]:
    """An offload that would be faster on the same devices and is not taken: by how much, and the settings that take
    it."""
    offloading = (
        other
        for other in others
        if describe_offload(other.plan.offload)
        and other.plan.hardware.num_gpus == chosen.plan.hardware.num_gpus
        and method_name(other.plan.tuning) == method_name(chosen.plan.tuning)
        and keeps_rules(other.plan, "train")
    )
    best = max(offloading, key=lambda other: other.estimate.tokens_per_second, default=chosen)
    gain = best.estimate.tokens_per_second / chosen.estimate.tokens_per_second - 1
    if gain > 1 / TIE - 1:
        places = zip(("parameters", "optimizer", "activations"), best.plan.offload.places, strict=True)
        settings = ", ".join(f"offload_{part}: {where}" for part, where in places if where != "device")
        enough = format_percent(1 / OFFLOADED - 1, digits=0)
        yield (
            f"offload: none; {describe_offload(best.plan.offload)} would be up to {format_percent(gain, digits=0)} "
            f"faster if nothing else uses the links to the host, and is chosen where it gains {enough}; to choose it: "
            f"{settings}"
        )


def adapter_decisions(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Lines about added tokens, adapters and dropout, in this order."""
    lora, dropout = plan.tuning, plan.model.dropout
    if plan.added_tokens:
        yield (
            f"added_tokens: {len(plan.added_tokens)} more; embedding and head have {plan.model.vocab_size:,} rows "
            "then, new ones begin as the mean of the others"
        )
        if isinstance(lora, Lora) and len(recipe.lora_modules_to_save) < 2:
            yield (
                "lora_modules_to_save: embed_tokens and lm_head, because of added_tokens: beside frozen tables the new "
                "rows would stay as they began"
            )
    if isinstance(lora, Lora):
        yield from _adapters(recipe, lora, plan)
        yield from _whole_tables(lora, plan)
        yield from _experts(lora, plan)
        if lora.dropout:  # linears beside one another share one input, and each keeps its own dropped one
            without = replace(plan, tuning=replace(lora, dropout=0.0))
            yield (
                f"lora_dropout: {lora.dropout:g} keeps a dropped input and a mask for each adapted linear: "
                f"{_costs(plan, without, 'lora_dropout: 0')}"
            )
    if dropout != NO_DROPOUT and plan.model.is_traced:
        # its blocks are traced with the rates of its config: there is no figure without them
        yield (
            f"{describe_dropout(dropout)}, from the model's config, is in these figures. "
            "Rates of 0 in its config.json switch it off"
        )
    elif dropout != NO_DROPOUT:  # the config stays as it is: its cost is said, and where it could be changed
        without = replace(plan, model=replace(plan.model, dropout=NO_DROPOUT))
        scores = "no CPU kernel has attention dropout, so the scores are kept in memory; "
        yield (
            f"{describe_dropout(dropout)}, from the model's config: {scores * falls_back_to_scores(plan)}"
            f"{_costs(plan, without, 'without')}. Rates of 0 in its config.json switch it off"
        )


def _costs(plan: Plan, without: Plan, name: str) -> str:
    peaks = [predict_memory(each).peak_bytes for each in (plan, without)]
    seconds = [predict_step_time(each).step_seconds for each in (plan, without)]
    return (
        f"{format_bytes(max(0, peaks[0] - peaks[1]))} more at the peak than {name}, and a step takes "
        f"{format_percent(seconds[0] / seconds[1] - 1)} longer"
    )


def _adapters(recipe: Recipe, lora: Lora, plan: Plan) -> Iterator[str]:
    """Rank, scale, linears and blocks of the adapters."""
    if recipe.lora_alpha is None:
        yield f"lora_alpha: {lora.alpha} = 2 · lora_r {lora.rank}"
    narrowest = max(min(m.in_features, m.out_features) for m in plan.model.linears if m.adaptable)
    if lora.rank > narrowest:
        yield (
            f"note on lora_r: no linear has more than {narrowest} dimensions on its narrow side; a rank "
            f"of {lora.rank} costs memory and gains nothing over {narrowest}"
        )
    asked, targets = recipe.lora_target_modules, ", ".join(lora.targets)
    if asked == ["all-linear"]:
        yield f"LoRA targets: all linears of a block that take adapters: {targets}"
    elif set(asked) != set(lora.targets):
        yield f"LoRA targets: {', '.join(asked)} means {targets}"
    if lora.layers:
        words = f"LoRA blocks: {as_ranges(lora.layers)} of 0–{plan.model.num_layers - 1}"
        if untouched := untouched_blocks(plan.model, lora):
            words += (
                f"; nothing trains before block {untouched}, so backward ends there and the {untouched} before it keep "
                "no activations, recomputed or not"
            )
        yield words
    if lora.rslora:
        root = lora.rank**0.5
        yield (
            f"rslora: what adapters add is scaled by alpha / √r = {lora.alpha} / {root:.4g} = "
            f"{lora.alpha / root:.4g}; without it by alpha / r = {lora.alpha / lora.rank:.4g}"
        )


def _whole_tables(lora: Lora, plan: Plan) -> Iterator[str]:
    """Says what training the embedding and head whole costs: they are most of what is trained."""
    if tables := trained_tables(plan.model, lora):
        count = sum(tensor.elements for tensor in tables)
        tied = ", one tensor," if plan.model.tied_embeddings else ""
        share = f"{format_count(count)} of the {format_count(trained_parameters(plan))} trained parameters"
        yield (
            f"note on lora_modules_to_save: {' and '.join(lora.modules_to_save)}{tied} train whole, {share}; they are "
            "part of every checkpoint and of the adapter. vLLM takes no such adapter: export: merged for it"
        )


def _experts(lora: Lora, plan: Plan) -> Iterator[str]:
    """Experts are stacked in parameters: packed where transformers' interface runs them, adapted by name."""
    experts = [(m, count) for m, count in plan.model.counted_linears() if m.part == "experts"]
    if not experts:
        return
    width = plan.precision.compute_bytes
    adapted, can_be = any(m.is_target(lora.targets) for m, _ in experts), all(m.stacked for m, _ in experts)
    hint = "" if adapted or not can_be else " (lora_target_modules: [all-linear, experts] adapts them)"
    words = f"{'adapted' if adapted else 'not adapted'}{hint}"
    if dense := sum(count * m.weights for m, count in experts if not is_packed(m, lora.base)):
        packed = "" if isinstance(lora.base, Dense) else "not quantised, "
        yield f"note on experts: {packed}{words}; {format_bytes(dense * width)} of weights stay in {8 * width} bit"
    else:
        largest = width * max(m.weights for m, _ in experts)
        yield f"note on experts: quantised, {words}"
        yield f"experts: those of a block are made whole for their product, {format_bytes(largest)} at most"
