"""One line for each thing the user left open: what was taken, why, and the arithmetic."""

from collections.abc import Iterator, Sequence

from fitune.estimate.division import num_ranks
from fitune.estimate.overhead import checkpoint_bytes, unmeasured_bytes
from fitune.planner.candidates import Request
from fitune.planner.defaults import GLOBAL_BATCH_SIZE, default_learning_rate
from fitune.planner.methods import CHOICE, why_on_cpu
from fitune.planner.reasons.adapter_decisions import adapter_decisions
from fitune.planner.reasons.placement_decisions import devices_here, devices_left_idle, placement_decisions
from fitune.spec.model.known_models import find_known_model
from fitune.spec.model.traits import attends, flash_refused
from fitune.spec.plan import (
    AdamW,
    AdamW8bit,
    ChunkedLoss,
    Dense,
    Full,
    Lomo,
    Lora,
    PlainLoss,
    Plan,
    Precision,
    base_of,
    updates_in_backward,
)
from fitune.spec.predictions import Phase, Priced
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import (
    describe_base_of,
    describe_loss,
    method_name,
)
from fitune.units import counted, format_bytes, format_percent

HIGH_RATE, LOW_RATE = 10.0, 0.01
"""A learning rate beyond these multiples of the method's default is most often a slip."""


def decisions_of(
    asked: Recipe, request: Request, chosen: Priced, runners_up: Sequence[Priced]
) -> tuple[str, ...]:
    """Lines about the chosen plan; ``asked`` is the recipe as the user wrote it."""
    recipe, plan = request.recipe, chosen.plan
    lines: list[Iterator[str]] = [
        devices_left_idle(request, plan),
        devices_here(asked, request, plan),
        _usual_row(asked, plan),
        _tuning(recipe, plan),
        placement_decisions(recipe, chosen, runners_up),
        _precision(recipe, plan),
        _clipping_in_backward(recipe, plan),
        _batch(recipe, plan),
        _recompute(recipe, plan),
        _loss(recipe, plan),
        _attention(recipe, plan),
        _compiled(plan),
        _tf32(recipe, plan),
        _learning_rate(recipe, plan),
        _saving(recipe, plan),
        _overruled(recipe),
        _idle(recipe, plan),
        adapter_decisions(recipe, plan),
        _output(recipe, plan),
        _faster_method(recipe, chosen, runners_up),
        _long_update(chosen),
        _guessed_rates(plan),
        _measured_kind(plan),
        _fixed_segments(plan),
        _traced_by_others(plan),
        _text_part(plan),
        _stored_weights(plan),
        _mixers(plan),
    ]
    return tuple(line for group in lines for line in group)


def _usual_row(asked: Recipe, plan: Plan) -> Iterator[str]:
    if "seq_len" not in asked.model_fields_set:
        most = " (the longest the model takes)" if plan.batch.seq_len < asked.seq_len else ""
        yield f"seq_len: {plan.batch.seq_len}{most}, fitune's default"


def _tuning(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.tuning is not None and not (recipe.tuning == "qlora" and recipe.quantization is None):
        return
    name = method_name(plan.tuning)
    if recipe.tuning is not None:
        yield f"quantization: {describe_base_of(plan.tuning)}, fitune's default for {recipe.tuning}"
    elif asked := "export" if recipe.export else recipe.adapters_asked_by:
        yield f"tuning: {name}, because of {asked}: {getattr(recipe, asked)} (taken is {CHOICE})"
    elif recipe.optimizer_in_backward:
        yield "tuning: full, because of optimizer_in_backward, which gains nothing with adapters"
    elif isinstance(plan.tuning, Full):
        yield f"tuning: full, every weight is trained ({CHOICE})"
    else:
        yield f"tuning: {name} ({CHOICE})"


def _saving(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.async_save is None and plan.run.saves and not plan.hardware.gpu.is_cpu:
        size = format_bytes(checkpoint_bytes(plan))
        if plan.run.async_save:
            yield f"async_save: true, checkpoints are copied to the host ({size}) and written while training goes on"
        else:
            yield f"async_save: false, because the host has no room for a copy of {size}: steps wait for each save"


def _precision(recipe: Recipe, plan: Plan) -> Iterator[str]:
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


def _clipping_in_backward(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if isinstance(plan.tuning, Full) and plan.goes_back_twice and recipe.optimizer_in_backward:
        why = f"the norm is clipped at {recipe.max_grad_norm:g}"
        if "max_grad_norm" not in recipe.model_fields_set:
            why += ", fitune's default"
        instead = "max_grad_norm: 0 or max_grad_value spares the second"
        if plan.precision is Precision.FP16:
            why, instead = (
                "a step that overflows in fp16 must change nothing",
                "precision: bf16 spares the second",
            )
        yield f"optimizer in backward: {why}, so a first backward pass measures and a second one updates; {instead}"


def _batch(recipe: Recipe, plan: Plan) -> Iterator[str]:
    batch, ranks = plan.batch, num_ranks(plan)
    if recipe.micro_batch_size is not None and recipe.gradient_accumulation_steps is not None:
        return
    whole = "fitune's default"
    if recipe.global_batch_size is not None:
        whole = "asked for"
    elif batch.global_batch_size * ranks != GLOBAL_BATCH_SIZE:
        whole = f"the nearest to fitune's default of {GLOBAL_BATCH_SIZE}"
    unit = "packs" if batch.packing else "rows"
    times = f" × {ranks} devices" if ranks > 1 else ""
    line = (
        f"batch: {batch.micro_batch_size} × {batch.accumulation} accumulated{times} = "
        f"{batch.global_batch_size * ranks} {unit} ({whole}) of at most {batch.seq_len} tokens"
    )
    if recipe.micro_batch_size is None and recipe.gradient_accumulation_steps is None:
        fastest = f"the fastest split that fits (within 1 %, the one {_LEAN if batch.packing else _BUSY})"
        if not plan.model.separates_rows:
            line += f"; one row at a time, because rows of one stream would see each other in {plan.model.model_type}"
        else:
            line += f"; {'the split that needs least memory' if _is_least(recipe) else fastest}"
    yield line


def _is_least(recipe: Recipe) -> bool:
    return recipe.objective == "least-memory"


_LEAN = "that needs least memory"
_BUSY = "with the largest micro-batch, since unpacked rows are short"


def _recompute(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.gradient_checkpointing is not None:
        return
    blocks, layers = plan.recompute.blocks, plan.model.num_layers
    if blocks == 0:
        yield "recompute: no block, all activations fit"
    else:
        again = f"{format_percent(blocks / layers, digits=0)} of a forward pass"
        most = "the fewest that fit with this batch and loss"
        if _is_least(recipe):
            most = "which need least memory"
        elif plan.offload.activations != "device":
            most = "as many as cost less than 1 % of the speed, so that fewer activations are offloaded"
        yield f"recompute: {blocks} of {layers} blocks, {most}; adds {again}"


def _loss(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.loss is not None and (recipe.loss == "plain" or recipe.loss_chunk_tokens is not None):
        return
    logits = plan.model.vocab_size * (4 if plan.precision is Precision.FP32 else 8)
    tokens = plan.batch.micro_batch_tokens
    match plan.loss:
        case PlainLoss():
            yield f"loss: plain, all logits at once take {format_bytes(tokens * logits)}"
        case ChunkedLoss(chunk_tokens=size):
            yield (
                f"loss: {describe_loss(plan.loss)}, logits take {format_bytes(min(size, tokens) * logits)}"
                + (f" instead of {format_bytes(tokens * logits)}" if size < tokens else "")
            )


def _attention(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.attn_implementation is not None or not attends(plan.model):
        return
    why = flash_refused(plan.model, plan.hardware.gpu, plan.precision)
    yield f"attention: {plan.attention}" + (
        f", because {why}" if why else ", the fastest that stores no attention scores"
    )


def _compiled(plan: Plan) -> Iterator[str]:
    if plan.compile_blocks:
        yield (
            "note on torch_compile: what it gains and how it changes memory is not estimated, and a rehearsal traces "
            "the blocks uncompiled; all figures are of uncompiled blocks. Evaluation runs uncompiled"
        )


def _tf32(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if plan.tf32:
        yield "note on tf32: seconds are estimated for fp32 products; TF32's are up to eight times as fast"
    elif recipe.tf32:
        why = (
            f"precision {plan.precision.value} has no fp32 products"
            if plan.precision is not Precision.FP32
            else f"{plan.hardware.gpu.name} has none; Ampere and newer GPUs do"
        )
        yield f"note on tf32: it has no effect here: {why}"


def _learning_rate(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if recipe.learning_rate is None:
        yield f"learning rate: {plan.schedule.learning_rate:g}, fitune's default for this tuning and optimizer"
        return
    usual = default_learning_rate(plan.tuning, plan.optimizer)
    times = recipe.learning_rate / usual
    if times > HIGH_RATE:
        high = f"{recipe.learning_rate:g} is {times:,.0f} × the usual {usual:g}"
        yield f"note on learning_rate: {high}; the loss may diverge"
    elif 0 < times < LOW_RATE:
        yield (
            f"note on learning_rate: {recipe.learning_rate:g} is 1/{1 / times:,.0f} of the usual {usual:g}; "
            "the model may hardly change"
        )


def _overruled(recipe: Recipe) -> Iterator[str]:
    """Settings that were given and that another one overrules."""
    for ruling, unused in (("max_steps", "num_epochs"), ("warmup_steps", "warmup_ratio")):
        if getattr(recipe, ruling) is not None and unused in recipe.model_fields_set:
            yield f"note on {unused}: {ruling} {getattr(recipe, ruling)} is set too, and it is the one that counts"


def _idle(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Settings that were given and that belong to a method or an optimizer that was not taken."""
    base = base_of(plan)
    read = frozenset() if isinstance(base, Dense) else base.settings
    owners = {
        "lora_": ("tuning", isinstance(plan.tuning, Lora)),
        "rslora": ("tuning", isinstance(plan.tuning, Lora)),
        "adam_": ("optimizer", isinstance(plan.optimizer, AdamW | AdamW8bit)),
        "momentum": ("optimizer", recipe.optimizer == "momentum"),
        "quantization_group": ("tuning", "quantization_group_size" in read),
        "double_quant": ("tuning", "double_quantization" in read),
        "max_grad_value": ("tuning", updates_in_backward(plan.tuning)),
        "optimizer_in_backward": ("tuning", isinstance(plan.tuning, Full)),
    }
    for name, field in type(recipe).model_fields.items():
        idle = [what for start, (what, taken) in owners.items() if name.startswith(start) and not taken]
        if idle and name in recipe.model_fields_set and getattr(recipe, name) != field.default:
            yield f"note on {name}: it does nothing with the {idle[0]} of this plan"


def _output(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if plan.run.upload_to:
        yield f"output: {plan.run.output_dir}, and from there {plan.run.upload_to}"
    elif recipe.output_dir is None:
        yield f"output: {plan.run.output_dir}"
    if plan.run.push_to_hub:
        readers = "for everybody to read" if plan.run.hub_public else "private"
        yield f"the Hub: {plan.run.push_to_hub} gets the export, {readers}"


_MUCH_FASTER = 2


def _faster_method(recipe: Recipe, chosen: Priced, others: Sequence[Priced]) -> Iterator[str]:
    """Quality comes first; what that costs is said when it is much."""
    for other in others:
        ratio = other.estimate.tokens_per_second / chosen.estimate.tokens_per_second
        name = method_name(other.plan.tuning)
        if recipe.tuning is None and ratio >= _MUCH_FASTER and name != method_name(chosen.plan.tuning):
            yield f"note on tuning: {name} fits too and is {ratio:.1f} × as fast; tuning: {name} takes it"


def _long_update(chosen: Priced) -> Iterator[str]:
    """An update that takes most of the step is paid less often with a larger batch."""
    seconds = chosen.estimate.time.phases[Phase.UPDATE]
    share = seconds / chosen.estimate.step_seconds
    if share > 0.5:
        yield (
            f"note on global_batch_size: the update takes {format_percent(share, digits=0)} of a step, whatever its "
            f"batch ({chosen.estimate.time.limits[Phase.UPDATE]}); a larger batch pays it less often"
        )


def _guessed_rates(plan: Plan) -> Iterator[str]:
    """A processor shared by several processes is measured as they will use it, and is another one than whole."""
    hardware = plan.hardware
    if not hardware.gpu.is_cpu or hardware.calibration is not None:
        return
    processes, threads = hardware.gpus_per_node, hardware.threads_per_process
    shared, command = "", "fitune doctor --calibrate"
    if processes > 1:
        shared = f" with {processes} processes of {threads} thread{'s' if threads > 1 else ''} each"
        command = f"OMP_NUM_THREADS={threads} torchrun --nproc-per-node {processes} -m {command}"
    yield (
        f"note on times: this processor was never measured{shared}, so they are a guess; {command} measures it in "
        "one to two minutes"
    )


def _measured_kind(plan: Plan) -> Iterator[str]:
    """Yields how far plans on such cards were off (docs/step-time.md), or what is kept free until that is measured."""
    if found := plan.hardware.measured:
        what = "processor" if plan.hardware.gpu.is_cpu else "card"
        yield f"measured on {counted(found.cards, what)} of this kind: {found}"
    if spare := unmeasured_bytes(plan.hardware):
        yield (
            f"no card of this kind was measured: {format_bytes(spare)} of each stay free until "
            "fitune doctor --prove has run on one"
        )


def _fixed_segments(plan: Plan) -> Iterator[str]:
    if not plan.hardware.growing_segments:
        yield (
            "torch's allocator has no expandable segments here (Windows, or PYTORCH_ALLOC_CONF): 20 % and more of what "
            "comes and goes is planned as allocator slack"
        )


def _traced_by_others(plan: Plan) -> Iterator[str]:
    if plan.model.is_traced:
        from fitune.spec.model.tracing import versions_note  # no model with formulas needs it

        note = versions_note(plan.model)
        if note is not None:
            yield note


def _mixers(plan: Plan) -> Iterator[str]:
    if chunk := plan.model.chunk:
        how = f"in chunks of {chunk} tokens" if chunk > 1 else "one token after another"
        kernels = "flash-linear-attention" if plan.model.has_delta_rule else "mamba_ssm"
        yield (
            f"note on mixers: time and memory are those of transformers' own code for {plan.model.model_type}, which "
            f"goes {how}; kernels of {kernels} and causal_conv1d run in its place on a GPU where they are installed, "
            "and were not measured"
        )


def _stored_weights(plan: Plan) -> Iterator[str]:
    if stored := plan.model.stored_as:
        known = find_known_model(plan.model.name)
        source = f" ({known.copy_of} is the original)" if known and known.copy_of else ""
        yield (
            f"note on model: {plan.model.name} is stored in few bits ({stored}), and its weights become 16 bit when "
            f"they are read{source}; tuning: qlora keeps the base in 4 bits"
        )


def _text_part(plan: Plan) -> Iterator[str]:
    if plan.model.has_vision_part:
        yield (
            f"note on model: {plan.model.name} has a vision part; its text part alone is planned and trained, and a "
            "full or merged export is that part"
        )
