"""Names of a plan's parts, everywhere a person reads: one value, one name."""

from typing import TYPE_CHECKING

from fitune.units import (
    as_ranges,
    counted,
    format_bytes,
    format_learning_rate,
    format_number,
    format_percent,
)
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import Dropout
from fitune.values.model.traits import attends
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    Backend,
    ChunkedLoss,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Dense,
    Full,
    InBackward,
    Lomo,
    Lora,
    Loss,
    Offload,
    Optimizer,
    Plan,
    Quantiser,
    Schedule,
    Sgd,
    Sharding,
    Single,
    Tuning,
    Zero,
)
from fitune.values.schedule import warmup_steps

if TYPE_CHECKING:  # those who only plan load no reports
    from fitune.values.reports import Scale, ScoreReport


def describe_plan(plan: Plan) -> str:
    """``LoRA r16 on 7 linears, bf16-master, AdamW, 0 of 32 blocks recomputed, chunked loss (1024), flash attention,
    micro-batch 4 × 2048 tokens × 4 accumulated``."""
    batch = plan.batch
    return ", ".join(
        (
            *method_parts(plan),
            *([describe_placement(plan)] if describe_placement(plan) else []),
            f"{plan.recompute.blocks} of {plan.model.num_layers} blocks recomputed",
            describe_loss(plan.loss),
            *([f"{plan.attention} attention"] if attends(plan.model) else []),
            *(["Liger's kernels"] if plan.kernels == "liger" else []),
            *(["compiled blocks"] if plan.compile_blocks else []),
            *(["TF32 products"] if plan.tf32 else []),
            f"micro-batch {batch.micro_batch_size} × {batch.seq_len} tokens × {batch.accumulation} accumulated",
        )
    )


def describe_schedule(schedule: Schedule, *, total: int) -> str:
    """``rises to 2.0e-04 over 12 steps and falls to 0 by a cosine``: the learning rate of ``total`` steps."""
    rate = format_learning_rate(schedule.learning_rate)
    warmup = warmup_steps(schedule, total=total)
    start = f"rises to {rate} over {counted(warmup, 'step')}" if warmup else f"starts at {rate}"
    least = format_learning_rate(schedule.learning_rate * schedule.min_ratio) if schedule.min_ratio else "0"
    then = {
        "constant": "stays there",
        "linear": f"falls to {least} in a line",
        "cosine": f"falls to {least} by a cosine",
    }
    return f"{start} and {then[schedule.kind]}"


def describe_dropout(dropout: Dropout) -> str:
    """``dropout 0.1 on attention and residuals``; of several rates each with its places."""
    same = dropout.attention_output == dropout.mlp_output
    residuals = (
        {"residuals": dropout.mlp_output}
        if same
        else {"attention's output": dropout.attention_output, "the MLP's output": dropout.mlp_output}
    )
    rates = {"attention": dropout.attention, **residuals, "the embedding": dropout.embedding}
    places: dict[float, list[str]] = {}
    for place, rate in rates.items():
        places.setdefault(rate, []).append(place)
    parts = (f"{rate:g} on {_listed(names)}" for rate, names in places.items() if rate)
    return f"dropout {', '.join(parts)}"


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def describe_method(plan: Plan) -> str:
    """``full, bf16-master, AdamW``."""
    return ", ".join(method_parts(plan))


def method_parts(plan: Plan) -> tuple[str, ...]:
    """Tuning, precision and optimizer, each in words; LOMO has no optimizer to name."""
    optimizer = "" if isinstance(plan.tuning, Lomo) else describe_optimizer(plan.optimizer)
    if isinstance(plan.tuning, Full) and isinstance(plan.tuning.update, InBackward):
        optimizer += f" in backward, {describe_clip(plan.tuning.update.clip)}"
    words = (describe_tuning(plan.tuning), plan.precision.value, optimizer)
    return tuple(word for word in words if word)


def describe_tuning(tuning: Tuning) -> str:
    """``full``, ``AdaLomo clipped at norm 1``, ``DoRA r16 on 7 linears of a base in NF4``."""
    match tuning:
        case Full():
            return "full"
        case Lomo(adaptive=adaptive, clip=clip):
            return f"{'AdaLomo' if adaptive else 'LOMO'} {describe_clip(clip)}"
        case Lora(rank=rank, targets=targets, base=base):
            scaled = "rank-stabilised " if tuning.rslora else ""
            linears = "1 linear" if len(targets) == 1 else f"{len(targets)} linears"
            adapters = f"{scaled}{'DoRA' if tuning.dora else 'LoRA'} r{rank} on {linears}"
            adapters += f" of blocks {as_ranges(tuning.layers)}" if tuning.layers else ""
            adapters += f", {' and '.join(tuning.modules_to_save)} whole," if tuning.modules_to_save else ""
            return (
                adapters.removesuffix(",")
                if isinstance(base, Dense)
                else f"{adapters} of {describe_base(base)}"
            )


def describe_clip(clip: ClipByValue | ClipByNorm) -> str:
    """Returns how gradients are clipped, in words."""
    match clip:
        case ClipByValue(value=value):
            return f"clipped to ±{value:g}"
        case ClipByNorm(max_norm=max_norm):
            return f"clipped at norm {max_norm:g}" if max_norm else "not clipped"


def method_name(tuning: Tuning) -> str:
    """The recipe's word for it: ``qlora``."""
    match tuning:
        case Full():
            return "full"
        case Lomo(adaptive=adaptive):
            return "adalomo" if adaptive else "lomo"
        case Lora(base=base):
            return "lora" if isinstance(base, Dense) else "qlora"


def describe_base_of(tuning: Tuning) -> str:
    """Returns the numbers of a frozen base in words; empty without one."""
    return describe_base(tuning.base) if isinstance(tuning, Lora) else ""


def describe_base(base: Dense | Quantiser) -> str:
    """``a base in NF4 with double quantisation``."""
    return "a dense base" if isinstance(base, Dense) else f"a base in {base}"


def describe_placement(plan: Plan) -> str:
    """Sharding and offload, where there are any: ``ZeRO-3 by FSDP2 on 8 devices, parameters on the CPU``."""
    words = [describe_sharding(plan.sharding), describe_offload(plan.offload)]
    if words[0]:
        words[0] += f" on {plan.hardware.num_gpus} devices"
    return ", ".join(word for word in words if word)


def describe_sharding(sharding: Sharding) -> str:
    """``ZeRO-3 by FSDP2``; nothing on a single device."""
    match sharding:
        case Single():
            return ""
        case Ddp():
            return "DDP"
        case Zero(stage=stage, backend=backend, hybrid=hybrid):
            return f"ZeRO-{stage} by {backend_name(backend)}{' within each node' if hybrid else ''}"


def backend_name(backend: Backend) -> str:
    """``FSDP2`` or ``DeepSpeed``."""
    match backend:
        case "fsdp":
            return "FSDP2"
        case "deepspeed":
            return "DeepSpeed"


def describe_offload(offload: Offload) -> str:
    """``optimizer on the CPU, parameters on NVMe``; nothing when all stays on the device."""
    names = {"cpu": "the CPU", "nvme": "NVMe"}
    places = (
        ("parameters", offload.parameters),
        ("optimizer", offload.optimizer),
        ("activations", offload.activations),
    )
    return ", ".join(f"{what} on {names[place]}" for what, place in places if place != "device")


def describe_optimizer(optimizer: Optimizer) -> str:
    """Returns the name of the optimizer as people write it."""
    match optimizer:
        case AdamW():
            return "AdamW"
        case AdamW8bit():
            return "8-bit AdamW"
        case Sgd(momentum=momentum):
            return "momentum SGD" if momentum > 0 else "SGD"


def describe_loss(loss: Loss) -> str:
    """``chunked loss (1024)`` or ``plain loss``."""
    return f"chunked loss ({loss.chunk_tokens})" if isinstance(loss, ChunkedLoss) else "plain loss"


def describe_grade(grade: float, scale: "Scale") -> str:
    """``45.0 %`` of a share, ``7.31`` points, ``-12.40 nats``, ``5.213`` of a perplexity or any other number."""
    if scale == "share":
        return format_percent(grade)
    if scale == "nats":
        return f"{grade:,.2f} nats"
    return f"{grade:.2f}" if scale == "points" else format_number(grade)


def describe_mean(report: "ScoreReport", grader: str) -> str:
    """The grader's mean; ``–`` where it graded no row."""
    graded = report.rows - report.ungraded.get(grader, 0)
    return describe_grade(report.grades[grader], report.scales.get(grader, "share")) if graded else "–"


def describe_interval(report: "ScoreReport", grader: str) -> str:
    """The 95 % interval of the grader's mean, as ``41.0 % to 49.0 %``; empty where all its grades are alike."""
    low, high = report.intervals.get(grader, (0.0, 0.0))
    ends = (describe_grade(end, report.scales.get(grader, "share")) for end in (low, high))
    return " to ".join(ends) if high > low else ""


def describe_devices(hardware: Hardware) -> str:
    """``2 nodes of 8 × v100-32gb``."""
    devices = f"{hardware.gpus_per_node} × {hardware.gpu.name}"
    return devices if hardware.nodes == 1 else f"{hardware.nodes} nodes of {devices}"


def devices_with_memory(hardware: Hardware) -> str:
    """``2 × rtx-4090 of 23.99 GiB, 1.50 GiB of it taken by other programs; not used: 1 × rtx-3060``."""
    words = f"{describe_devices(hardware)} of {format_bytes(hardware.gpu.memory_bytes)}"
    if hardware.taken_bytes:
        words += f", {format_bytes(hardware.taken_bytes)} of it taken by other programs"
    return f"{words}; not used: {hardware.left_out}" if hardware.left_out else words


def describe_rates(plan: Plan) -> str:
    """Returns what a speed of the plan rests on: ``datasheet rates, rows of 506 tokens``."""
    mean = plan.batch.mean_row_tokens
    return plan.hardware.rates + (f", rows of {counted(mean, 'token')}" if mean else "")
