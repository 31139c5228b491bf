"""Many plans of a recipe: with a change on top, the largest that fits, each of some models with rows of each length.

The matrix has the form of "A Study of Optimizations for Fine-tuning Large Language Models" (arXiv 2406.02290); its
cells are this planner's own search.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fitune.errors import RecipeError
from fitune.estimate.division import num_ranks
from fitune.planner.candidates import Method, Request
from fitune.planner.defaults import ROW_STEP, with_added_rows
from fitune.planner.explain import memory_sum, priced_data
from fitune.planner.fit import OFFLOADED, TIE, last_true
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods_for
from fitune.planner.nothing_fits import largest_known_model
from fitune.planner.search import first_choice, refuse_contradictions
from fitune.spec.counts import count_parameters
from fitune.spec.machines.hardware import Hardware
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.plan import Sharding, Single, Zero
from fitune.spec.predictions import Priced
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.rules import keeps_rules
from fitune.spec.words import (
    describe_base_of,
    describe_offload,
    describe_plan,
    describe_sharding,
    devices_with_memory,
    method_name,
)
from fitune.units import format_bytes, format_count, format_percent, format_rate, format_seconds, wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """``taken`` is the plan of the recipe, ``pinned`` the best with the change; it may not fit."""

    change: str
    taken: Priced
    pinned: Priced


def compare(
    changed: Recipe, change: str, *, taken: Priced, model: ModelSpec, hardware: Hardware
) -> Alternative:
    """The plan with the change and the same tuning; when nothing fits, the smallest plan stands for it.

    Raises RecipeError where no plan can have the change.
    """
    request = Request.of(changed, model, hardware)
    refuse_contradictions(request)
    is_about_tuning = changed.tuning is not None or changed.quantization_is_asked_for
    own = method_name(taken.plan.tuning)

    def is_like(method: Method) -> bool:
        """True for the plan's own method in the precision that is asked for; for every method where tuning changes."""
        same = method_name(method.tuning) == own and changed.precision in (None, method.precision.value)
        return is_about_tuning or same

    pinned = first_choice(request, wanted=is_like)
    if pinned is None:
        raise RecipeError(f"{change}: no plan of this recipe can have this setting", hint="fewer pins")
    return Alternative(change=change, taken=taken, pinned=pinned)


def explain_alternative(alternative: Alternative) -> str:
    """Both plans, then what changes, in bytes and seconds."""
    taken, pinned = alternative.taken, alternative.pinned
    marks = [
        "" if keeps_rules(each.plan, "train") else " (only planned: fitune plan says what is trained instead)"
        for each in (taken, pinned)
    ]
    lines = [f"taken{marks[0]}", wrapped(describe_plan(taken.plan)), f"with {alternative.change}{marks[1]}"]
    if pinned.plan == taken.plan:
        return "\n".join([*lines, wrapped("the same plan: that is what was taken")])
    lines += [wrapped(describe_plan(pinned.plan)), "", *_differences(taken, pinned), ""]
    return "\n".join([*lines, wrapped(_verdict(pinned, taken))])


def _verdict(pinned: Priced, taken: Priced) -> str:
    if not pinned.estimate.fits:
        return f"does not fit: {memory_sum(pinned.estimate)}"
    ratio = taken.estimate.tokens_per_second / pinned.estimate.tokens_per_second
    same_tuning = pinned.plan.tuning == taken.plan.tuning
    if same_tuning and TIE < ratio < 1 / TIE:
        return f"fits and is as fast within {format_percent(1 - TIE, digits=0)}; of such plans the simplest is taken"
    same_place = (pinned.plan.hardware, pinned.plan.model) == (taken.plan.hardware, taken.plan.model)
    if ratio < 1 and same_tuning and same_place:
        enough = format_percent(1 / OFFLOADED - 1, digits=0)
        return f"fits and takes {ratio:.2f} × the time: offload is taken only where it gains {enough}"
    return f"fits and takes {ratio:.2f} × the time per token"


def _differences(one: Priced, other: Priced) -> Iterator[str]:
    """Rows of a quantity, both plans' figures and the change."""
    pairs = [(each.estimate, each.plan) for each in (one, other)]

    def size(name: str, *sizes: int) -> Iterator[tuple[str, ...]]:
        """A row of bytes, unless both are 0."""
        taken, pinned = sizes
        if format_bytes(taken) != "0 B" or format_bytes(pinned) != "0 B":
            change = f"{'+' if pinned >= taken else '−'}{format_bytes(abs(pinned - taken))}"
            yield name, format_bytes(taken), format_bytes(pinned), change

    def ratio(name: str, words: Callable[[float], str], *values: float) -> tuple[str, ...]:
        """A row of seconds or speeds."""
        return name, *map(words, values), f"× {values[1] / values[0]:.2f}"

    rows = [plan.batch.global_batch_size * num_ranks(plan) for _, plan in pairs]
    for name, taken, pinned, change in (
        ("", "taken", "with it", "change"),
        *size("a device at its peak", *(each.peak_bytes for each, _ in pairs)),
        *size("a node's host memory", *(each.host_bytes for each, _ in pairs)),
        *size("a node's NVMe", *(each.nvme_bytes for each, _ in pairs)),
        ("rows in a step", *(f"{count:,}" for count in rows), f"{rows[1] - rows[0]:+,}"),
        *size("sent in a step", *(each.communication_bytes for each, _ in pairs)),
        ratio("a step", format_seconds, *(each.step_seconds for each, _ in pairs)),
        ratio("speed", format_rate, *(each.tokens_per_second for each, _ in pairs)),
    ):
        yield f"  {name:<22}{taken:>18}{pinned:>18}{change:>18}"


def alternative_data(alternative: Alternative) -> dict[str, Any]:
    """The object ``why`` of ``--json``."""
    taken, pinned = alternative.taken, alternative.pinned
    return {
        "change": alternative.change,
        "fits": pinned.estimate.fits,
        "taken": priced_data(taken),
        "pinned": priced_data(pinned),
    }


Quantity = Literal["seq_len", "micro_batch", "model"]
QUANTITIES: tuple[Quantity, ...] = ("seq_len", "micro_batch", "model")
MOST_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """``value``: tokens, rows or a model's name; None when nothing fits."""

    method: Method
    value: int | str | None

    @property
    def label(self) -> tuple[str, str, str]:
        """Method, base and precision in words."""
        return _label(self.method)


def largest(recipe: Recipe, quantity: str, *, model: ModelSpec, hardware: Hardware) -> tuple[Largest, ...]:
    """The largest ``quantity`` that fits, by method that the recipe leaves open, by bisection: bytes only grow with it.

    Rows are tried in steps of 64 up to the model's longest, micro-batches without accumulation, models from the
    table of known ones. Weights and optimizer stay on the device unless the recipe says
    otherwise. Raises RecipeError for another quantity and for contradictions.
    """
    if quantity not in QUANTITIES:
        raise RecipeError(f"--largest {quantity} is not known", hint=f"one of {', '.join(QUANTITIES)}")
    request = Request.of(recipe, model, hardware)
    request = replace(request, recipe=_small(request.recipe))
    refuse_contradictions(request)
    offloads = {"cpu", "nvme"} & {recipe.offload_parameters, recipe.offload_optimizer}
    found: dict[tuple[str, str, str], Largest] = {}
    for method in methods_for(request):
        one = MethodSearch(request, method, on_device=not offloads)
        if _label(method) not in found and one.placements:
            found[_label(method)] = Largest(method=method, value=_value(quantity, one))
    return tuple(found.values())


def _small(recipe: Recipe) -> Recipe:
    """One row at a time and nothing accumulated, where the recipe leaves that open."""
    pins = {
        "micro_batch_size": recipe.micro_batch_size or 1,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps or 1,
        "global_batch_size": None,
    }
    return recipe.model_copy(update=pins)


def _label(method: Method) -> tuple[str, str, str]:
    return method_name(method.tuning), describe_base_of(method.tuning), method.precision.value


def _value(quantity: str, one: MethodSearch) -> int | str | None:
    request = one.request

    def fits(**pins: int) -> bool:
        """True if the method fits with these settings pinned."""
        return replace(one, request=request.with_pins(**pins)).fits()

    def model_fits(other: Request) -> bool:
        """True if the same method fits for the request ``other``, whose model is another one."""
        alike = next((each for each in methods_for(other) if _label(each) == _label(one.method)), None)
        return alike is not None and replace(one, request=other, method=alike).fits()

    match quantity:
        case "seq_len":
            longest = request.model.max_seq_len
            steps = last_true(
                lambda n: fits(seq_len=min(n * ROW_STEP, longest)), 0, -(-longest // ROW_STEP) + 1
            )
            return min(steps * ROW_STEP, longest) or None
        case "micro_batch":
            return last_true(lambda rows: fits(micro_batch_size=rows), 0, MOST_ROWS + 1) or None
        case _:
            return largest_known_model(request, model_fits)


def explain_largest(recipe: Recipe, quantity: str, found: tuple[Largest, ...]) -> str:
    """One line for each method."""
    small = _small(recipe)
    steps = small.gradient_accumulation_steps
    batch = f"{small.micro_batch_size} × {steps} accumulated"
    what = {
        "seq_len": f"longest row in tokens, batch {batch} a device",
        "micro_batch": (
            f"most rows of {recipe.seq_len} tokens in a micro-batch, {steps} accumulated, up to {MOST_ROWS:,}"
        ),
        "model": f"largest known model, rows of {recipe.seq_len} tokens, batch {batch} a device",
    }[quantity]
    lines = [what]
    for item in found:
        name, base, precision = item.label
        value = f"{item.value:,}" if isinstance(item.value, int) else item.value or "none fits"
        lines.append(f"  {', '.join(filter(None, (name, precision, base))):<60}{value:>34}")
    return "\n".join(lines)


def largest_data(quantity: str, found: tuple[Largest, ...]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    keys = ("tuning", "base", "precision", "value")
    rows = [dict(zip(keys, (*item.label, item.value), strict=True)) for item in found]
    return {"largest": quantity, "methods": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One combination of switches, with the smallest batch that the recipe allows."""

    method: str
    sharding: str
    """``one device``, ``DDP``, ``ZeRO-1`` …, by whichever backend."""
    recompute: bool
    """Off: no block is recomputed. On: as many as it takes."""
    offload: bool
    """True if weights or optimizer states wait on the host, as far as the stage allows."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model with one length of rows."""

    model: ModelSpec
    seq_len: int
    taken: Priced | None
    """The plan of ``fitune plan``, or the smallest when none fits; None for rows the model was not made for."""
    settings: tuple[Setting, ...] = ()

    @property
    def fits(self) -> bool:
        """True if the plan that is taken fits."""
        return self.taken is not None and self.taken.estimate.fits

    def some_fits(self, **wanted: str | bool) -> bool:
        """True if a setting with these values fits: ``some_fits(method="lora", sharding="DDP", offload=False)``."""
        return any(
            setting.fits and all(getattr(setting, name) == value for name, value in wanted.items())
            for setting in self.settings
        )

    def needs(self, method: str, sharding: str) -> tuple[str, ...] | None:
        """The fewest of ``recompute`` and ``offload`` with which it fits, recompute first; None when it does not."""
        for needed in MARKS:
            if needed is not None and self.some_fits(
                method=method, sharding=sharding, recompute="recompute" in needed, offload="offload" in needed
            ):
                return needed
        return None


MARKS: dict[tuple[str, ...] | None, str] = {
    (): "●",
    ("recompute",): "r",
    ("offload",): "o",
    ("recompute", "offload"): "b",
    None: "·",
}
"""Switches that a setting needs on top -> one character."""

LEGEND = (
    "● fits as it is, r needs recomputed blocks, o needs weights or optimizer on the host, b needs both, "
    "· does not fit; the smallest batch, activations on the device"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Cells by model, then by rising length of rows."""

    hardware: Hardware
    models: tuple[ModelSpec, ...]
    seq_lens: tuple[int, ...]
    cells: tuple[Cell, ...]

    def row(self, model: ModelSpec) -> tuple[Cell, ...]:
        """Cells of a model, by rising length of rows."""
        return tuple(cell for cell in self.cells if cell.model == model)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that were tried, in order of appearance."""
        return tuple(dict.fromkeys(setting.method for cell in self.cells for setting in cell.settings))

    @property
    def shardings(self) -> tuple[str, ...]:
        """Names of the placements that were tried, in alphabetical order."""
        return tuple(sorted({setting.sharding for cell in self.cells for setting in cell.settings}))


def matrix(
    recipe: Recipe, *, models: Sequence[ModelSpec], seq_lens: Sequence[int], hardware: Hardware
) -> Matrix:
    """Every pin of the recipe holds in every cell. Raises RecipeError or HardwareError for contradictions."""
    if not models or not seq_lens:
        raise RecipeError(
            "a matrix needs models and lengths", hint="--models llama-2-7b,13b --context 512,1024"
        )
    lengths = tuple(sorted(set(seq_lens)))
    models = tuple(with_added_rows(recipe, model) for model in models)
    return Matrix(
        hardware=hardware,
        models=models,
        seq_lens=lengths,
        cells=tuple(_cell(recipe, model, length, hardware) for model in models for length in lengths),
    )


def _cell(recipe: Recipe, model: ModelSpec, seq_len: int, hardware: Hardware) -> Cell:
    if seq_len > model.max_seq_len:
        return Cell(model=model, seq_len=seq_len, taken=None)
    recipe = recipe.model_copy(update={"model": model.name, "seq_len": seq_len})
    request = Request(recipe=recipe, model=model, hardware=hardware)
    refuse_contradictions(request)
    return Cell(
        model=model,
        seq_len=seq_len,
        taken=first_choice(request),
        settings=tuple(_settings(request)),
    )


def _settings(request: Request) -> Iterator[Setting]:
    """Activations stay on the device here: what recomputing and offloaded states do is to be seen by itself."""
    recipe, asked = request.recipe, request.recipe.gradient_checkpointing
    for method in compared(request):
        for recompute in (False, True) if asked is None else (bool(asked),):
            pinned = request.with_pins(
                offload_activations=recipe.offload_activations or "device",
                gradient_checkpointing=asked if recompute else False,
            )
            one = MethodSearch(pinned, method)
            groups: dict[tuple[str, bool], bool] = {}
            for placement in one.placements:
                key = _stage_name(placement.sharding), not placement.states_stay
                groups[key] = groups.get(key, False) or one.has_room(placement)
            for (sharding, offload), fits in groups.items():
                name = method_name(method.tuning)
                yield Setting(method=name, sharding=sharding, recompute=recompute, offload=offload, fits=fits)


def compared(request: Request) -> tuple[Method, ...]:
    """The best of every tuning that is no last resort: full, LoRA and QLoRA, or what the recipe pins."""
    found: dict[str, Method] = {}
    for method in methods_for(request):
        if not method.last_resort:
            found.setdefault(method_name(method.tuning), method)
    return tuple(found.values())


def _stage_name(sharding: Sharding) -> str:
    """``one device``, ``DDP``, ``ZeRO-2``."""
    if isinstance(sharding, Zero):
        return f"ZeRO-{sharding.stage}"
    return "one device" if isinstance(sharding, Single) else "DDP"


def explain_matrix(matrix: Matrix) -> str:
    """A block for each model: the plan taken for each length, and the marks of the settings."""
    usable = [cell.taken.estimate.usable_bytes for cell in matrix.cells if cell.taken is not None]
    have = f", {format_bytes(usable[0])} usable" if usable else ""
    lines = [f"{devices_with_memory(matrix.hardware)}{have} · {matrix.hardware.rates}"]
    width = max(len(matrix.shardings), 5)

    def line(words: tuple[str, ...], marks: Sequence[str]) -> str:
        """Numbers flush right: the first column and the last two; a cell without a plan has words alone."""
        if len(words) == 2:
            return f"{words[0]:>8}  {words[1]}"
        tokens, method, sharding, blocks, host, peak, speed = words
        last = " ".join(method_words(mark).rjust(width) for mark in marks)
        return f"{tokens:>8}  {method:<9}{sharding:<19}{blocks:<12}{host:<24}{peak:>11}{speed:>10}  {last}"

    names = ("tokens", "method", "sharding", "recomputed", "on the host", "peak", "tokens/s")
    for model in matrix.models:
        count = format_count(count_parameters(model).total)
        lines += ["", f"{model.name} · {count} parameters", line(names, matrix.methods)]
        lines += [
            line(
                (f"{cell.seq_len:,}", *taken_words(cell)),
                [marks(cell, each, matrix) for each in matrix.methods],
            )
            for cell in matrix.row(model)
        ]
    if matrix.methods:
        columns = ", ".join(matrix.shardings)
        lines += ["", wrapped(f"marks: {columns} for each method: {LEGEND}", indent=0, hanging=2)]
    return "\n".join(lines)


def taken_words(cell: Cell) -> tuple[str, ...]:
    """Method, sharding, recomputed blocks, what waits on the host, peak, tokens/s or what is short; or why no plan."""
    if cell.taken is None:
        return (f"rows of at most {cell.model.max_seq_len:,} tokens: the model was made for no longer",)
    plan, estimate = cell.taken.plan, cell.taken.estimate
    device, host = (
        estimate.peak_bytes - estimate.usable_bytes,
        estimate.host_bytes - estimate.usable_host_bytes,
    )
    short = f"−{format_bytes(device)}" if device > 0 else f"host −{format_bytes(host)}"
    return (
        method_words(method_name(plan.tuning)) if estimate.fits else "none",
        describe_sharding(plan.sharding).replace(" by ", " ") or "one device",
        f"{plan.recompute.blocks} of {plan.model.num_layers}",
        describe_offload(plan.offload).replace(" on the CPU", "").replace(" on NVMe", " (NVMe)") or "–",
        format_bytes(estimate.peak_bytes),
        f"{estimate.tokens_per_second:,.0f}" if estimate.fits else short,
    )


def marks(cell: Cell, method: str, matrix: Matrix) -> str:
    """``·r●●``: a character of MARKS for each sharding."""
    return "".join(MARKS[cell.needs(method, sharding)] for sharding in matrix.shardings)


def method_words(method: str) -> str:
    """``QLoRA`` for qlora; other words stay as they are."""
    return {"lora": "LoRA", "qlora": "QLoRA", "lomo": "LOMO", "adalomo": "AdaLomo"}.get(method, method)


def short_name(model: ModelSpec) -> str:
    """``Llama-2-7b`` for meta-llama/Llama-2-7b-hf."""
    return model.name.rstrip("/").rsplit("/", 1)[-1].removesuffix("-hf")


def card(cell: Cell, matrix: Matrix) -> tuple[str, tuple[str, ...], str, float]:
    """Title, lines and method of a cell in a picture, and its peak as a share of what is usable."""
    if cell.taken is None:
        return "no such rows", ("the model was made for", f"at most {cell.model.max_seq_len:,}"), "", 0.0
    estimate = cell.taken.estimate
    method, sharding, blocks, host, peak, speed = taken_words(cell)
    lines = (
        f"{peak} of {format_bytes(estimate.usable_bytes)}",
        f"{blocks} blocks recomputed",
        f"host: {host}" if host != "–" else "nothing on the host",
        format_rate(estimate.tokens_per_second) if estimate.fits else f"{speed} is missing",
        *(f"{method_words(name):<7} {marks(cell, name, matrix)}" for name in matrix.methods),
    )
    title, name = f"{method} · {sharding}", method_name(cell.taken.plan.tuning)
    filled = estimate.peak_bytes / estimate.usable_bytes
    return (title, lines, name, filled) if estimate.fits else ("nothing fits", lines, "", filled)


def matrix_data(matrix: Matrix) -> dict[str, Any]:
    """The object that ``--json`` prints; a cell without a plan has rows longer than its model takes."""
    hardware = matrix.hardware
    cells = [
        {
            "model": cell.model.name, "context": cell.seq_len, "fits": cell.fits,
            "settings": [asdict(setting) for setting in cell.settings],
            **(
                priced_data(cell.taken) if cell.taken is not None
                else {"why": f"the model was made for {cell.model.max_seq_len} positions"}
            ),
        }
        for cell in matrix.cells
    ]  # fmt: skip
    return {
        "hardware": {"gpu": hardware.gpu.name, "gpus": hardware.gpus_per_node, "nodes": hardware.nodes},
        "models": [model.name for model in matrix.models],
        "context": list(matrix.seq_lens),
        "cells": cells,
    }
