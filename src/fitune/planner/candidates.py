"""Candidates of the search: methods, placements of the states, splits of the batch, losses, recomputed blocks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from fitune.planner.defaults import (
    CHUNK_TOKENS,
    GLOBAL_BATCH_SIZE,
    MOST_MICRO_BATCH,
    batch_of,
    data_of,
    run_of,
    schedule_of,
    with_added_rows,
    with_usual_row,
)
from fitune.recipe.recipe import Recipe
from fitune.values.counts import has_tf32
from fitune.values.machines.hardware import Gpu, Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.model.traits import flash_refused
from fitune.values.plan import (
    Attention,
    Backend,
    Batch,
    ChunkedLoss,
    Ddp,
    Loss,
    Offload,
    Optimizer,
    Place,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    Sharding,
    Single,
    Tuning,
    Zero,
)
from fitune.values.rules import Purpose, adds_gradients_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything a plan is made from; plans keep the rules that bind any of ``purposes``."""

    recipe: Recipe
    model: ModelSpec
    hardware: Hardware
    purposes: tuple[Purpose, ...] = ("plan",)
    wanted: "Callable[[Method], bool]" = lambda method: True
    """Leaves methods out of the search."""

    @classmethod
    def of(
        cls, recipe: Recipe, model: ModelSpec, hardware: Hardware, purposes: tuple[Purpose, ...] = ("plan",)
    ) -> "Request":
        """The request with a row of the tables for each added token, and rows no longer than the model takes."""
        model = with_added_rows(recipe, model)
        recipe = with_usual_row(recipe, model)
        return cls(recipe=recipe, model=model, hardware=hardware, purposes=purposes)

    def with_pins(self, **pins: object) -> "Request":
        """The request with other settings in the recipe."""
        return replace(self, recipe=self.recipe.model_copy(update=pins))


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Everything that decides quality. Inside a method the fastest plan that fits is taken."""

    tuning: Tuning
    precision: Precision
    optimizer: Optimizer
    last_resort: bool = False
    """Taken when nothing else fits, never shown beside what does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Over which devices the states are divided, and what leaves them."""

    sharding: Sharding
    offload: Offload

    @classmethod
    def of(cls, plan: Plan) -> "Placement":
        """The placement of a plan."""
        return cls(sharding=plan.sharding, offload=plan.offload)

    @property
    def is_plain(self) -> bool:
        """True if nothing is offloaded."""
        return self.offload.places == ("device", "device", "device")

    @property
    def states_stay(self) -> bool:
        """Weights and optimizer stay on the device."""
        return self.offload.parameters == self.offload.optimizer == "device"

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Order of placements that are equally fast: the simplest is taken."""
        places = [place for place in self.offload.places if place != "device"]
        stage = self.sharding.stage if isinstance(self.sharding, Zero) else 0
        foreign = isinstance(self.sharding, Zero) and self.sharding.backend == "deepspeed"
        return len(places), int(foreign), stage


def draft(request: Request, method: Method, placement: Placement) -> Plan:
    """The plan of a method with the smallest batch and nothing recomputed: what the search varies."""
    recipe, model, hardware = request.recipe, request.model, request.hardware
    return Plan(
        model=model,
        model_path=model.name,
        hardware=devices_of(placement, hardware),
        tuning=method.tuning,
        precision=method.precision,
        optimizer=method.optimizer,
        sharding=placement.sharding,
        offload=placement.offload,
        recompute=Recompute(blocks=block_counts(recipe, layers=model.num_layers)[0]),
        attention=attention_of(recipe, model=model, gpu=hardware.gpu, precision=method.precision),
        kernels=recipe.kernels,
        compile_blocks=recipe.torch_compile,
        tf32=recipe.tf32 and has_tf32(hardware.gpu, method.precision),
        loss=losses(recipe)[-1],
        batch=batch_of(recipe, micro=1, steps=1),
        schedule=schedule_of(recipe, method.tuning, method.optimizer),
        data=data_of(recipe),
        run=run_of(recipe, model=model, tuning=method.tuning),
        added_tokens=tuple(recipe.added_tokens),
    )


def devices_of(placement: Placement, hardware: Hardware) -> Hardware:
    """One process has one device. The free bytes of a disk change by the minute: they count where something uses it."""
    if "nvme" not in placement.offload.places:
        hardware = replace(hardware, nvme_bytes=0)
    if isinstance(placement.sharding, Single):
        return replace(hardware, gpus_per_node=1, nodes=1, internode_bandwidth=0.0)
    return hardware


def attention_of(recipe: Recipe, *, model: ModelSpec, gpu: Gpu, precision: Precision) -> Attention:
    """The user's, else FlashAttention where device, model and precision can, else torch's choice."""
    if recipe.attn_implementation is not None:
        return recipe.attn_implementation
    if model.writes_scores:
        return "eager"
    return "sdpa" if flash_refused(model, gpu, precision) else "flash"


def batches(recipe: Recipe, method: Method, *, ranks: int) -> tuple[Batch, ...]:
    """Every split of the global batch over the ranks and into micro-batches that the pins allow, the largest first.

    Empty when there is none. Where gradients do not add up the micro-batch is the rank's whole share, unless the pins
    say otherwise.
    """
    whole = () if adds_gradients_up(method.tuning) else tuple(_whole_share(recipe, ranks))
    splits = whole or _splits(recipe, ranks)
    return tuple(batch_of(recipe, micro=micro, steps=steps) for micro, steps in splits)


def _whole_share(recipe: Recipe, ranks: int) -> Iterator[tuple[int, int]]:
    """All rows of a rank at once, if the pins leave that open."""
    if recipe.gradient_accumulation_steps not in (None, 1):
        return
    rows = rows_per_rank(recipe, ranks)
    if recipe.global_batch_size is None:
        rows = recipe.micro_batch_size or rows
    if rows is not None and recipe.micro_batch_size in (None, rows):
        yield rows, 1


def _splits(recipe: Recipe, ranks: int) -> Iterator[tuple[int, int]]:
    micro, steps = recipe.micro_batch_size, recipe.gradient_accumulation_steps
    if micro is not None and steps is not None:
        yield micro, steps
        return
    rows = rows_per_rank(recipe, ranks)
    if rows is None:
        return
    sizes = range(min(rows, MOST_MICRO_BATCH), 0, -1) if steps is None else (rows // steps,)
    for size in sizes if micro is None else (micro,):
        if size and rows % size == 0 and steps in (None, rows // size):
            yield size, rows // size


def rows_per_rank(recipe: Recipe, ranks: int) -> int | None:
    """Rows of one rank in one optimizer step; None when the global batch cannot be divided evenly.

    Left open, the global batch is the multiple of ranks and pins that is nearest to the default.
    """
    if recipe.global_batch_size is not None:
        return None if recipe.global_batch_size % ranks else recipe.global_batch_size // ranks
    pinned = recipe.micro_batch_size or recipe.gradient_accumulation_steps or 1
    return max(1, round(GLOBAL_BATCH_SIZE / (ranks * pinned))) * pinned


def losses(recipe: Recipe) -> tuple[Loss, ...]:
    """The losses that the recipe allows, the one with the largest logits first."""
    if recipe.loss == "plain":
        return (PlainLoss(),)
    sizes = CHUNK_TOKENS if recipe.loss_chunk_tokens is None else (recipe.loss_chunk_tokens,)
    chunked = tuple(ChunkedLoss(chunk_tokens=size) for size in sizes)
    plain_allowed = recipe.loss is None and recipe.loss_chunk_tokens is None
    return (PlainLoss(), *chunked) if plain_allowed else chunked


def block_counts(recipe: Recipe, *, layers: int) -> range:
    """The numbers of recomputed blocks that may be tried: one, or 0…L."""
    asked = recipe.gradient_checkpointing
    if asked is None:
        return range(layers + 1)
    blocks = (layers if asked else 0) if isinstance(asked, bool) else asked
    return range(blocks, blocks + 1)


def every_placement(request: Request) -> Iterator[Placement]:
    """Every placement that the recipe's pins leave open, whether or not it keeps the rules."""
    for sharding in _shardings(request.recipe, request.hardware):
        for offload in _offloads(request.recipe):
            yield Placement(sharding=sharding, offload=offload)


def _shardings(recipe: Recipe, hardware: Hardware) -> Iterator[Sharding]:
    """One process on one device; on several DDP and the stages of ZeRO by each backend."""
    pins = (recipe.zero, recipe.backend, recipe.hybrid_sharding)
    found: list[Sharding] = [Single()] if hardware.num_gpus == 1 else []
    if hardware.num_gpus > 1 or pins != (None, None, None):
        found += [Ddp(), *_zeros(recipe, hardware)]
    for sharding in found:
        given: tuple[object, ...] = (0, None, False)
        if isinstance(sharding, Zero):
            given = (sharding.stage, sharding.backend, sharding.hybrid)
        if all(pin in (None, value) for pin, value in zip(pins, given, strict=True)):
            yield sharding


def _zeros(recipe: Recipe, hardware: Hardware) -> Iterator[Zero]:
    for stage in (1, 2, 3):
        for backend in get_args(Backend):
            settings = tuple(sorted(recipe.deepspeed.items())) if backend == "deepspeed" else ()
            yield Zero(stage=stage, backend=backend, settings=settings)
            if recipe.hybrid_sharding or (hardware.nodes > 1 and hardware.gpus_per_node > 1):
                yield Zero(stage=stage, backend=backend, hybrid=True)


def _offloads(recipe: Recipe) -> Iterator[Offload]:
    """Left open, activations go to the host at most, and states to NVMe only where a folder for them is named."""
    states: tuple[Place, ...] = ("device", "cpu", "nvme") if recipe.nvme_path else ("device", "cpu")
    pins = (recipe.offload_parameters, recipe.offload_optimizer, recipe.offload_activations)
    places = (
        own if pin is None else (pin,) for pin, own in zip(pins, (states, states, states[:2]), strict=True)
    )
    for parameters, optimizer, activations in product(*places):
        away = "nvme" in (parameters, optimizer, activations)
        yield Offload(
            parameters=parameters, optimizer=optimizer, activations=activations,
            nvme_path=recipe.nvme_path if away else "",
        )  # fmt: skip
