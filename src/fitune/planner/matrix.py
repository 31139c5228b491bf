"""The optimisation matrix: for each model and length of rows the plan that is taken, and which settings fit.

The form is that of "A Study of Optimizations for Fine-tuning Large Language Models" (arXiv 2406.02290); the cells
are this planner's own search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fitune.errors import RecipeError
from fitune.planner.candidates import Method, Request
from fitune.planner.defaults import with_added_rows
from fitune.planner.explain import priced_data
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods_for
from fitune.planner.search import first_choice, refuse_contradictions
from fitune.recipe.recipe import Recipe
from fitune.units import format_bytes, format_count, format_rate, wrapped
from fitune.values.counts import count_parameters
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Sharding, Single, Zero
from fitune.values.predictions import Priced
from fitune.values.words import (
    describe_offload,
    describe_sharding,
    devices_with_memory,
    method_name,
)


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

    def needs(self, method: str, sharding: str) -> tuple[str, ...] | None:
        """The fewest of ``recompute`` and ``offload`` with which it fits, recompute first; None when it does not."""
        fitting = {
            ("recompute",) * setting.recompute + ("offload",) * setting.offload
            for setting in self.settings
            if setting.fits and (setting.method, setting.sharding) == (method, sharding)
        }
        return next((needed for needed in MARKS if needed in fitting), None)


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

    def text(self) -> str:
        """A block for each model: the plan taken for each length, and the marks of the settings."""
        usable = [cell.taken.estimate.usable_bytes for cell in self.cells if cell.taken is not None]
        have = f", {format_bytes(usable[0])} usable" if usable else ""
        lines = [f"{devices_with_memory(self.hardware)}{have} · {self.hardware.rates}"]
        width = max(len(self.shardings), 5)

        def line(words: tuple[str, ...], marks: Sequence[str]) -> str:
            """Numbers flush right: the first column and the last two; a cell without a plan has words alone."""
            if len(words) == 2:
                return f"{words[0]:>8}  {words[1]}"
            tokens, method, sharding, blocks, host, peak, speed = words
            last = " ".join(method_words(mark).rjust(width) for mark in marks)
            return (
                f"{tokens:>8}  {method:<9}{sharding:<19}{blocks:<12}{host:<24}{peak:>11}{speed:>10}  {last}"
            )

        names = ("tokens", "method", "sharding", "recomputed", "on the host", "peak", "tokens/s")
        for model in self.models:
            count = format_count(count_parameters(model).total)
            lines += ["", f"{model.name} · {count} parameters", line(names, self.methods)]
            lines += [
                line(
                    (f"{cell.seq_len:,}", *taken_words(cell)),
                    [marks(cell, each, self) for each in self.methods],
                )
                for cell in self.row(model)
            ]
        if self.methods:
            columns = ", ".join(self.shardings)
            lines += ["", wrapped(f"marks: {columns} for each method: {LEGEND}", indent=0, hanging=2)]
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """The object that ``--json`` prints; a cell without a plan has rows longer than its model takes."""
        hardware = self.hardware
        cells = [
            {
                "model": cell.model.name, "context": cell.seq_len, "fits": cell.fits,
                "settings": [asdict(setting) for setting in cell.settings],
                **(
                    priced_data(cell.taken) if cell.taken is not None
                    else {"why": f"the model was made for {cell.model.max_seq_len} positions"}
                ),
            }
            for cell in self.cells
        ]  # fmt: skip
        return {
            "hardware": {"gpu": hardware.gpu.name, "gpus": hardware.gpus_per_node, "nodes": hardware.nodes},
            "models": [model.name for model in self.models],
            "context": list(self.seq_lens),
            "cells": cells,
        }


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


def taken_words(cell: Cell) -> tuple[str, ...]:
    """Method, sharding, recomputed blocks, what waits on the host, peak, tokens/s or what is short; or why no plan."""
    if cell.taken is None:
        return (f"rows of at most {cell.model.max_seq_len:,} tokens: the model was made for no longer",)
    plan, estimate = cell.taken.plan, cell.taken.estimate
    places = (
        ("", estimate.peak_bytes, estimate.usable_bytes),
        ("host ", estimate.host_bytes, estimate.usable_host_bytes),
        ("NVMe ", estimate.nvme_bytes, estimate.usable_nvme_bytes),
    )
    short = (
        f"{place}−{format_bytes(size - usable)}"
        for place, size, usable in places
        if size > usable and (usable or not place)
    )
    return (
        method_words(method_name(plan.tuning)) if estimate.fits else "none",
        describe_sharding(plan.sharding).replace(" by ", " ") or "one device",
        f"{plan.recompute.blocks} of {plan.model.num_layers}",
        describe_offload(plan.offload).replace(" on the CPU", "").replace(" on NVMe", " (NVMe)") or "–",
        format_bytes(estimate.peak_bytes),
        f"{estimate.tokens_per_second:,.0f}" if estimate.fits else next(short),
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
