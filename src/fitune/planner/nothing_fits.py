"""When nothing fits: the smallest memory that would do, who has it, and what change would help, all computed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fitune.errors import NothingFits
from fitune.estimate.memory import predict_memory
from fitune.estimate.overhead import usable_bytes
from fitune.planner.describe import describe_plan, wrapped
from fitune.planner.fit import cheapest_blocks
from fitune.spec.gpus import CARDS
from fitune.spec.hardware import Gpu, Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.model_config import load_model_spec
from fitune.spec.model_table import known_model_names
from fitune.spec.parameters import count_parameters
from fitune.spec.plan import Batch, ChunkedLoss, Full, Lora, Plan, Precision, Recompute
from fitune.spec.recipe import Recipe
from fitune.spec.reports import Rejection
from fitune.units import format_bytes

_SHORTEST_ROW = 64


def nothing_fits(
    recipe: Recipe,
    smallest: Sequence[Plan],
    rejected: Sequence[Rejection],
    *,
    model: ModelSpec,
    hardware: Hardware,
) -> NothingFits:
    """The error to raise; ``smallest`` is the smallest plan of every family that was searched."""
    best = min(smallest, key=_peak)
    usable = usable_bytes(hardware)
    lines = [
        f"nothing fits: {model.name} on one {hardware.gpu.name} of {format_bytes(hardware.gpu.memory_bytes)}, "
        f"{format_bytes(usable)} usable",
        *(f"{wrapped(item.what)}\n{wrapped(item.why, indent=4)}" for item in rejected),
        f"smallest memory that would do: {format_bytes(_peak(best))} ({_excess(best, usable)} short), with",
        wrapped(describe_plan(best)),
        _device_that_holds(best),
        *_about_more_devices(best, hardware),
    ]
    return NothingFits("\n".join(lines), hint=_advice(recipe, best, usable))


def _peak(plan: Plan) -> int:
    return predict_memory(plan).peak_bytes


def _excess(plan: Plan, usable: int) -> str:
    return format_bytes(_peak(plan) - usable)


def _device_that_holds(plan: Plan) -> str:
    """The known GPU with the least memory on which the plan fits."""
    for card in sorted(CARDS, key=lambda card: card.gpu.memory_bytes):
        if _runs_on(plan, card.gpu):
            return f"the smallest known GPU that holds it: {card.gpu.name}"
    largest = max(CARDS, key=lambda card: card.gpu.memory_bytes).gpu
    return f"no single known GPU holds it (the largest, {largest.name}, has {format_bytes(largest.memory_bytes)})"


def _runs_on(plan: Plan, gpu: Gpu) -> bool:
    needs_bf16 = plan.precision in (Precision.BF16, Precision.BF16_MASTER)
    if needs_bf16 and not gpu.has_bf16:
        return False
    hardware = replace(plan.hardware, gpu=gpu)
    return _peak(replace(plan, hardware=hardware)) <= usable_bytes(hardware)


def _about_more_devices(plan: Plan, hardware: Hardware) -> Iterator[str]:
    if hardware.num_gpus < 2:
        return
    total = usable_bytes(hardware) * hardware.num_gpus
    relation = "more" if total >= _peak(plan) else "still less"
    yield wrapped(
        f"{hardware.num_gpus} × {hardware.gpu.name} have {format_bytes(total)} usable together, {relation} than that; "
        "but this version trains in one process on one device, sharding over several is not in it",
        indent=0,
    )


def _advice(recipe: Recipe, best: Plan, usable: int) -> str:
    """Changes that were computed to fit; failing that, what the largest single change leaves short."""
    tried = list(_tried(recipe, best))
    helpful = [words for words, plan in tried if _peak(plan) <= usable]
    shorter = _longest_row_that_fits(best, usable)
    helpful += [f"seq_len: {shorter}"] if shorter is not None else []
    if helpful:
        return ", or ".join(helpful)
    notes = [f"{words} would need {format_bytes(_peak(plan))}" for words, plan in tried]
    fitting = _largest_model_that_fits(best, usable)
    if fitting is not None:
        notes.append(
            f"the largest known model that fits this way is {fitting[0]} ({format_bytes(_peak(fitting[1]))})"
        )
    lora = next((plan for _, plan in tried if isinstance(plan.tuning, Lora)), None)
    with_lora = _largest_model_that_fits(lora, usable) if lora is not None else None
    if with_lora is not None:
        notes.append(f"with tuning: lora it is {with_lora[0]} ({format_bytes(_peak(with_lora[1]))})")
    return "a smaller model or a larger device; " + "; ".join(notes)


def _largest_model_that_fits(plan: Plan, usable: int) -> tuple[str, Plan] | None:
    """The known model with the most parameters whose smallest plan of this family fits."""
    known = (load_model_spec(name, offline=True) for name in known_model_names())
    for model in sorted(known, key=lambda model: count_parameters(model).total, reverse=True):
        if count_parameters(model).total * plan.precision.compute_bytes > usable:
            continue
        tuning = plan.tuning
        if isinstance(tuning, Lora):
            tuning = replace(tuning, targets=model.adaptable_names)
        batch = replace(plan.batch, seq_len=min(plan.batch.seq_len, model.max_seq_len))
        other = smallest(
            replace(plan, model=model, tuning=tuning, batch=batch, recompute=Recompute(blocks=0))
        )
        if _peak(other) <= usable:
            return model.name, other
    return None


def _tried(recipe: Recipe, best: Plan) -> Iterator[tuple[str, Plan]]:
    """Single pins undone or lowered, each with its smallest plan."""
    if isinstance(best.tuning, Full):
        lora = Lora(rank=8, alpha=16, dropout=0.0, targets=best.model.adaptable_names)
        yield "tuning: lora", smallest(replace(best, tuning=lora))
    if best.precision is Precision.FP32 and best.hardware.gpu.has_bf16:
        yield "precision: bf16-master", smallest(replace(best, precision=Precision.BF16_MASTER))
    if best.precision is Precision.BF16_MASTER:
        yield "precision: bf16", smallest(replace(best, precision=Precision.BF16))
    if best.batch.micro_batch_size > 1:
        steps = best.batch.global_batch_size
        yield (
            f"micro_batch_size: 1, gradient_accumulation_steps: {steps}",
            smallest(replace(best, batch=replace(best.batch, micro_batch_size=1, accumulation=steps))),
        )
    if recipe.gradient_checkpointing is not None:
        yield "gradient_checkpointing open", smallest(best)
    if recipe.loss == "plain":
        yield "loss: chunked", smallest(replace(best, loss=ChunkedLoss(chunk_tokens=256)))


def smallest(plan: Plan) -> Plan:
    """The plan with the number of recomputed blocks that needs the least memory."""

    def bytes_of(blocks: int) -> int:
        return _peak(replace(plan, recompute=Recompute(blocks=blocks)))

    counts = range(plan.model.num_layers + 1)
    return replace(plan, recompute=Recompute(blocks=cheapest_blocks(bytes_of, counts)))


def _longest_row_that_fits(plan: Plan, usable: int) -> int | None:
    """The longest seq_len, a multiple of 64, at which the smallest plan fits: bytes only grow with tokens."""

    def fits(seq_len: int) -> bool:
        batch: Batch = replace(plan.batch, seq_len=seq_len)
        return _peak(replace(plan, batch=batch)) <= usable

    return _largest_multiple(fits, below=plan.batch.seq_len)


def _largest_multiple(fits: Callable[[int], bool], *, below: int) -> int | None:
    low, high = 0, -(-below // _SHORTEST_ROW)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * _SHORTEST_ROW):
            low = middle
        else:
            high = middle
    return low * _SHORTEST_ROW or None
