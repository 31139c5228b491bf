"""One line for each thing the user left open: what was taken, why, and the arithmetic."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fitune.estimate.division import num_ranks
from fitune.estimate.overhead import checkpoint_bytes, unmeasured_bytes
from fitune.planner.candidates import Method, Request
from fitune.planner.defaults import GLOBAL_BATCH_SIZE, adamw_of, idle_words, learning_rate_words
from fitune.planner.fit import tokens_per_second
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import CHOICE, lomo_of, why_on_cpu
from fitune.planner.state_decisions import adapter_decisions, devices_here, placement_decisions
from fitune.recipe.recipe import Recipe
from fitune.units import counted, format_bytes, format_dollars, format_percent, format_rate
from fitune.values.model.known_models import find_known_model
from fitune.values.model.traits import attends, flash_refused
from fitune.values.plan import (
    AdamW8bit,
    ChunkedLoss,
    Full,
    Lomo,
    PlainLoss,
    Plan,
    Precision,
    Sgd,
)
from fitune.values.predictions import Phase, Priced
from fitune.values.words import (
    describe_base_of,
    describe_loss,
    method_name,
)

MUCH_FASTER = 2
"""Times the speed from which a method that comes after the one taken is named."""
AT_A_COST = 1.4
"""Times the speed from which settings that change the quality are named."""
FURTHER_GAIN = 1.25
"""Times the speed of settings with better quality from which worse ones are named beside them."""


def decisions_of(
    asked: Recipe, request: Request, method: Method, chosen: Priced, runners_up: Sequence[Priced], *,
    price_per_gpu_hour: float,
) -> tuple[str, ...]:  # fmt: skip
    """Lines about the chosen plan, which trains by ``method``; ``asked`` is the recipe as the user wrote it."""
    recipe, plan = request.recipe, chosen.plan
    return (
        *devices_here(asked, request, plan),
        *_method(asked, recipe, plan),
        *placement_decisions(recipe, chosen, runners_up),
        *_precision(recipe, plan),
        *_batch(recipe, plan),
        *_recompute_and_loss(recipe, plan),
        *_kernels(recipe, plan),
        *learning_rate_words(recipe, plan),
        *_saves(recipe, plan),
        *idle_words(recipe, plan),
        *adapter_decisions(recipe, plan),
        *_output(recipe, plan),
        *_speed(recipe, chosen, runners_up),
        *_memory(plan),
        *_model(plan),
        *_faster_at_a_cost(request, method, chosen, price_per_gpu_hour=price_per_gpu_hour),
        *_fewer_nodes(request, method, chosen),
    )


def _method(asked: Recipe, recipe: Recipe, plan: Plan) -> Iterator[str]:
    """The length of rows, and the tuning or its base."""
    if "seq_len" not in asked.model_fields_set:
        most = " (the longest the model takes)" if plan.batch.seq_len < asked.seq_len else ""
        yield f"seq_len: {plan.batch.seq_len}{most}, fitune's default"
    name = method_name(plan.tuning)
    if recipe.tuning is not None:
        if recipe.tuning == "qlora" and recipe.quantization is None:
            yield f"quantization: {describe_base_of(plan.tuning)}, fitune's default for {recipe.tuning}"
    elif setting := "export" if recipe.export else recipe.adapters_asked_by:
        yield f"tuning: {name}, because of {setting}: {getattr(recipe, setting)} (taken is {CHOICE})"
    elif recipe.optimizer_in_backward:
        yield "tuning: full, because of optimizer_in_backward, which gains nothing with adapters"
    else:
        yield f"tuning: {name}{', every weight is trained' * isinstance(plan.tuning, Full)} ({CHOICE})"


def _precision(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """The precision, and a second backward pass that clipping takes."""
    why = {
        Precision.FP16: f"fp16 with fp32 masters and a loss scale, because {plan.hardware.gpu.name} has no bf16",
        Precision.BF16_MASTER: "bf16-master, bf16 compute with fp32 masters, so that no small update is rounded away",
        Precision.BF16: "bf16 without fp32 masters, which do not fit",
    }
    if recipe.precision is None and isinstance(plan.tuning, Lomo):
        yield f"precision: {plan.precision}; LOMO updates the weights themselves and keeps no fp32 masters"
    elif recipe.precision is None:
        yield f"precision: {why_on_cpu(plan) if plan.hardware.gpu.is_cpu else why[plan.precision]}"
    if plan.precision is Precision.BF16:
        yield (
            "note on bf16: with 8 significant bits an update smaller than about 1/256 of its weight is lost; "
            "bf16-master keeps it"
        )
    if isinstance(plan.tuning, Full) and plan.goes_back_twice and recipe.optimizer_in_backward:
        clips = f"the norm is clipped at {recipe.max_grad_norm:g}"
        if "max_grad_norm" not in recipe.model_fields_set:
            clips += ", fitune's default"
        instead = "max_grad_norm: 0 or max_grad_value spares the second"
        if plan.precision is Precision.FP16:
            clips = "a step that overflows in fp16 must change nothing"
            instead = "precision: bf16 spares the second"
        yield f"optimizer in backward: {clips}, so a first backward pass measures and a second one updates; {instead}"


def _batch(recipe: Recipe, plan: Plan) -> Iterator[str]:
    batch, ranks = plan.batch, num_ranks(plan)
    if recipe.micro_batch_size is not None and recipe.gradient_accumulation_steps is not None:
        return
    whole = "fitune's default"
    if recipe.global_batch_size is not None:
        whole = "asked for"
    elif batch.global_batch_size * ranks != GLOBAL_BATCH_SIZE:
        whole = f"the nearest to fitune's default of {GLOBAL_BATCH_SIZE}"
    line = (
        f"batch: {batch.micro_batch_size} × {batch.accumulation} accumulated{f' × {ranks} devices' * (ranks > 1)} = "
        f"{batch.global_batch_size * ranks} {batch.unit}s ({whole}) of at most "
        f"{batch.seq_len} tokens"
    )
    if recipe.micro_batch_size is None and recipe.gradient_accumulation_steps is None:
        lean, busy = "that needs least memory", "with the largest micro-batch, since unpacked rows are short"
        how = f"the fastest split that fits (within 1 %, the one {lean if batch.packing else busy})"
        if not plan.model.separates_rows:
            model = plan.model.model_type
            how = f"one row at a time, because rows of one stream would see each other in {model}"
        elif recipe.objective == "least-memory":
            how = f"the split {lean}"
        line += f"; {how}"
    yield line


def _recompute_and_loss(recipe: Recipe, plan: Plan) -> Iterator[str]:
    blocks, layers = plan.recompute.blocks, plan.model.num_layers
    if recipe.gradient_checkpointing is None and blocks == 0:
        yield "recompute: no block, all activations fit"
    elif recipe.gradient_checkpointing is None:
        most = "the fewest that fit with this batch and loss"
        if recipe.objective == "least-memory":
            most = "which need least memory"
        elif plan.offload.activations != "device":
            most = "as many as cost less than 1 % of the speed, so that fewer activations are offloaded"
        again = f"{format_percent(blocks / layers, digits=0)} of a forward pass"
        yield f"recompute: {blocks} of {layers} blocks, {most}; adds {again}"
    if recipe.loss is not None and (recipe.loss == "plain" or recipe.loss_chunk_tokens is not None):
        return
    logits = plan.model.vocab_size * (4 if plan.precision is Precision.FP32 else 8)
    tokens = plan.batch.micro_batch_tokens
    whole = format_bytes(tokens * logits)
    match plan.loss:
        case PlainLoss():
            yield f"loss: plain, all logits at once take {whole}"
        case ChunkedLoss(chunk_tokens=size):
            take = format_bytes(min(size, tokens) * logits)
            yield f"loss: {describe_loss(plan.loss)}, logits take {take}{f' instead of {whole}' * (size < tokens)}"


def _kernels(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Attention, compiled blocks, TF32."""
    if recipe.attn_implementation is None and attends(plan.model):
        why = flash_refused(plan.model, plan.hardware.gpu, plan.precision)
        because = f"because {why}" if why else "the fastest that stores no attention scores"
        yield f"attention: {plan.attention}, {because}"
    if plan.compile_blocks:
        yield (
            "note on torch_compile: what it gains and how it changes memory is not estimated, and a rehearsal traces "
            "the blocks uncompiled; all figures are of uncompiled blocks. Evaluation runs uncompiled"
        )
    if plan.tf32:
        yield "note on tf32: seconds are estimated for fp32 products; TF32's are up to eight times as fast"
    elif recipe.tf32:
        why = f"{plan.hardware.gpu.name} has none; Ampere and newer GPUs do"
        if plan.precision is not Precision.FP32:
            why = f"precision {plan.precision.value} has no fp32 products"
        yield f"note on tf32: it has no effect here: {why}"


def _saves(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Checkpoints, and settings that another one overrules."""
    if recipe.async_save is None and plan.run.saves and not plan.hardware.gpu.is_cpu:
        size = format_bytes(checkpoint_bytes(plan))
        if plan.run.async_save:
            yield f"async_save: true, checkpoints are copied to the host ({size}) and written while training goes on"
        else:
            yield f"async_save: false, because the host has no room for a copy of {size}: steps wait for each save"
    for ruling, unused in (("max_steps", "num_epochs"), ("warmup_steps", "warmup_ratio")):
        if getattr(recipe, ruling) is not None and unused in recipe.model_fields_set:
            yield f"note on {unused}: {ruling} {getattr(recipe, ruling)} is set too, and it is the one that counts"


def _output(recipe: Recipe, plan: Plan) -> Iterator[str]:
    run = plan.run
    if run.upload_to or recipe.output_dir is None:
        yield f"output: {run.output_dir}{f', and from there {run.upload_to}' * bool(run.upload_to)}"
    if run.push_to_hub:
        readers = "for everybody to read" if run.hub_public else "private"
        yield f"the Hub: {run.push_to_hub} gets the export, {readers}"


def _speed(recipe: Recipe, chosen: Priced, others: Sequence[Priced]) -> Iterator[str]:
    """Much faster methods (quality comes first, and what that costs is said), long updates, guessed rates."""
    estimate, hardware = chosen.estimate, chosen.plan.hardware
    for other in others:
        ratio = other.estimate.tokens_per_second / estimate.tokens_per_second
        name = method_name(other.plan.tuning)
        if recipe.tuning is None and ratio >= MUCH_FASTER and name != method_name(chosen.plan.tuning):
            yield f"note on tuning: {name} fits too and is {ratio:.1f} × as fast; tuning: {name} takes it"
    share = estimate.time.phases[Phase.UPDATE] / estimate.step_seconds
    if share > 0.5:
        yield (
            f"note on global_batch_size: the update takes {format_percent(share, digits=0)} of a step, whatever its "
            f"batch ({estimate.time.limits[Phase.UPDATE]}); a larger batch pays it less often"
        )
    if hardware.gpu.is_cpu and hardware.calibration is None:
        # one that several processes share is measured as they will use it, and is another one than whole
        processes, threads = hardware.gpus_per_node, hardware.threads_per_process
        shared, command = "", "fitune doctor --calibrate"
        if processes > 1:
            shared = f" with {processes} processes of {counted(threads, 'thread')} each"
            command = f"OMP_NUM_THREADS={threads} torchrun --nproc-per-node {processes} -m {command}"
        yield (
            f"note on times: this processor was never measured{shared}, so they are a guess; {command} measures it in "
            "one to two minutes"
        )


def _memory(plan: Plan) -> Iterator[str]:
    """How far plans on such cards were off (docs/step-time.md), or what is kept free until that is measured; and the
    allocator where it has no expandable segments."""
    if found := plan.hardware.measured:
        what = "processor" if plan.hardware.gpu.is_cpu else "card"
        yield f"measured on {counted(found.cards, what)} of this kind: {found}"
    if spare := unmeasured_bytes(plan.hardware):
        yield (
            f"no card of this kind was measured: {format_bytes(spare)} of each stay free until "
            "fitune doctor --prove has run on one"
        )
    if not plan.hardware.growing_segments:
        yield (
            "torch's allocator has no expandable segments here (Windows, or PYTORCH_ALLOC_CONF), so it loses several "
            "times as much: see allocator slack"
        )


def _model(plan: Plan) -> Iterator[str]:
    """Who traced the model, and what is special about its parts, its files and its kernels."""
    model = plan.model
    if model.is_traced:
        from fitune.values.model.tracing import versions_note  # no model with formulas needs it

        if (note := versions_note(model)) is not None:
            yield note
    if model.has_vision_part:
        yield (
            f"note on model: {model.name} has a vision part; its text part alone is planned and trained, and a full or "
            "merged export is that part"
        )
    if model.stored_as:
        known = find_known_model(model.name)
        source = f" ({known.copy_of} is the original)" if known and known.copy_of else ""
        yield (
            f"note on model: {model.name} is stored in few bits ({model.stored_as}), and its weights become 16 bit "
            f"when they are read{source}; tuning: qlora keeps the base in 4 bits"
        )
    if model.chunk:
        how = f"in chunks of {model.chunk} tokens" if model.chunk > 1 else "one token after another"
        kernels = "flash-linear-attention" if model.has_delta_rule else "mamba_ssm"
        yield (
            f"note on mixers: time and memory are those of transformers' own code for {model.model_type}, which "
            f"goes {how}; kernels of {kernels} and causal_conv1d run in its place on a GPU where they are installed, "
            "and were not measured"
        )


def _faster_at_a_cost(
    request: Request, method: Method, chosen: Priced, *, price_per_gpu_hour: float
) -> Iterator[str]:
    """Ways to train every weight on the devices alone that are much faster than with states on the host, and what each
    does to the result."""
    plan, recipe = chosen.plan, request.recipe
    is_open = recipe.precision is None and "optimizer" not in recipe.model_fields_set
    if (
        plan.tuning != Full()
        or plan.precision is not Precision.BF16_MASTER
        or plan.offload.optimizer == "device"
    ):
        return
    best = AT_A_COST * chosen.estimate.tokens_per_second
    same = replace(request, hardware=plan.hardware)  # where money counts, these may be fewer than there are
    for words, loses, other in _lesser(request, method) if is_open else ():
        found = MethodSearch(same, other, on_device=True).fastest(taken_only=True)
        speed = tokens_per_second(found[0]) if found else 0.0
        if speed >= best:
            best, ratio = FURTHER_GAIN * speed, speed / chosen.estimate.tokens_per_second
            cost = _cost_words(speed, chosen, price_per_gpu_hour)
            yield f"note on speed: {words} is {ratio:.1f} × as fast{cost} on the devices alone, and {loses}"


def _lesser(request: Request, method: Method) -> Iterator[tuple[str, str, Method]]:
    """Settings, what they do to the result, and the method, the better first."""
    rounded = "rounds away updates under 1/256 of a weight"
    recipe = request.recipe
    bf16 = replace(method, precision=Precision.BF16)
    yield "precision: bf16", rounded, bf16
    yield (
        "precision: bf16 with optimizer: adamw-8bit",
        f"{rounded} and keeps moments in 8 bits",
        replace(bf16, optimizer=adamw_of(recipe, AdamW8bit)),
    )
    adalomo = replace(
        bf16, tuning=lomo_of(recipe, adaptive=True), optimizer=Sgd(weight_decay=recipe.weight_decay)
    )
    yield "tuning: adalomo", f"{rounded} and keeps no momentum", adalomo


def _cost_words(speed: float, chosen: Priced, price: float) -> str:
    if not price:
        return ""
    dollars = price * chosen.plan.hardware.num_gpus / 3600 * 1e6
    there, here = dollars / speed, dollars / chosen.estimate.tokens_per_second
    return f" ({format_dollars(there)} instead of {format_dollars(here)} a million tokens)"


def _fewer_nodes(request: Request, method: Method, chosen: Priced) -> Iterator[str]:
    """Says so where one node alone trains faster than all of them."""
    hardware = chosen.plan.hardware
    if hardware.nodes == 1:
        return
    one_node = replace(request, hardware=replace(request.hardware, nodes=1, internode_bandwidth=0.0))
    found = MethodSearch(one_node, method).fastest(taken_only=True)
    speed = tokens_per_second(found[0]) if found else 0.0
    if speed > chosen.estimate.tokens_per_second:
        yield (
            f"note on nodes: one node alone is {speed / chosen.estimate.tokens_per_second:.1f} × as fast, "
            f"{format_rate(speed)}, because {hardware.internode_bandwidth * 8 / 1e9:g} Gbit/s "
            "between nodes is the limit; nodes: 1, or a larger global_batch_size, which sends as much for more rows"
        )
