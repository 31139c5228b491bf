"""A matrix as a table for people and as data for programs."""

from collections.abc import Iterator
from typing import Any

from fitune.planner.describe import wrapped
from fitune.planner.explain import estimate_data
from fitune.planner.matrix import Cell, Matrix
from fitune.spec.model import ModelSpec
from fitune.spec.parameters import count_parameters
from fitune.spec.plan import Plan
from fitune.spec.reports import Estimate, Priced
from fitune.spec.serial import to_data
from fitune.spec.words import (
    describe_offload,
    describe_plan,
    describe_sharding,
    devices_with_memory,
    method_name,
)
from fitune.units import format_bytes, format_count

MARKS: dict[tuple[str, ...] | None, str] = {
    (): "●",
    ("recompute",): "r",
    ("offload",): "o",
    ("recompute", "offload"): "b",
    None: "·",
}
"""What a setting needs, in one character."""

LEGEND = (
    "● fits as it is, r needs recomputed blocks, o needs weights or optimizer on the host, b needs both, "
    "· does not fit; the smallest batch, activations on the device"
)


def explain_matrix(matrix: Matrix) -> str:
    """A block for each model: the plan taken for each length, and the marks of the settings."""
    lines = [_title(matrix)]
    for model in matrix.models:
        count = format_count(count_parameters(model).total)
        lines += ["", f"{model.name} · {count} parameters", _header(matrix)]
        for cell in matrix.row(model):
            lines += _row(cell, matrix)
    if matrix.methods:
        columns = ", ".join(matrix.shardings)
        lines += ["", wrapped(f"marks: {columns} for each method: {LEGEND}", indent=0, hanging=2)]
    return "\n".join(lines)


def _title(matrix: Matrix) -> str:
    hardware = matrix.hardware
    estimates = [cell.taken.estimate for cell in matrix.cells if cell.taken is not None]
    usable = f", {format_bytes(estimates[0].usable_bytes)} usable" if estimates else ""
    return f"{devices_with_memory(hardware)}{usable} · {hardware.rates}"


_COLUMNS = (8, 9, 19, 12, 24, 11, 10)


def _header(matrix: Matrix) -> str:
    names = ("tokens", "method", "sharding", "recomputed", "on the host", "peak", "tokens/s")
    marks = [method_words(method).rjust(_mark_width(matrix)) for method in matrix.methods]
    return _line(names) + "  " + " ".join(marks)


def _row(cell: Cell, matrix: Matrix) -> Iterator[str]:
    length = f"{cell.seq_len:,}"
    if cell.taken is None:
        yield _line(
            (length, f"rows of at most {cell.model.max_seq_len:,} tokens: the model was made for no longer")
        )
        return
    marks = [_marks(cell, method, matrix).rjust(_mark_width(matrix)) for method in matrix.methods]
    yield _line((length, *taken_words(cell.taken))) + "  " + " ".join(marks)


def _mark_width(matrix: Matrix) -> int:
    return max(len(matrix.shardings), 5)


def _line(words: tuple[str, ...]) -> str:
    """The last columns are numbers, flush right, as is the first."""
    if len(words) < len(_COLUMNS):
        return words[0].rjust(_COLUMNS[0]) + "  " + "  ".join(words[1:])
    first, *texts, peak, speed = (
        word.rjust(width) if place in (0, 5, 6) else word.ljust(width)
        for place, (word, width) in enumerate(zip(words, _COLUMNS, strict=True))
    )
    return f"{first}  {''.join(texts)}{peak}{speed}"


def taken_words(taken: Priced) -> tuple[str, ...]:
    """Method, sharding, share of recomputed blocks, what waits on the host, peak, tokens/s or what is short."""
    plan, estimate = taken.plan, taken.estimate
    return (
        method_words(method_name(plan.tuning)) if estimate.fits else "none",
        short_sharding(plan),
        f"{plan.recompute.blocks} of {plan.model.num_layers}",
        describe_offload(plan.offload).replace(" on the CPU", "").replace(" on NVMe", " (NVMe)") or "–",
        format_bytes(estimate.peak_bytes),
        f"{estimate.tokens_per_second:,.0f}" if estimate.fits else short_of(estimate),
    )


def short_of(estimate: Estimate) -> str:
    """``−1.92 GiB``: on the device, else on the host."""
    device = estimate.peak_bytes - estimate.usable_bytes
    host = estimate.host_bytes - estimate.usable_host_bytes
    return f"−{format_bytes(device)}" if device > 0 else f"host −{format_bytes(host)}"


def short_sharding(plan: Plan) -> str:
    return describe_sharding(plan.sharding).replace(" by ", " ") or "one device"


def _marks(cell: Cell, method: str, matrix: Matrix) -> str:
    return "".join(MARKS[cell.needs(method, sharding)] for sharding in matrix.shardings)


def method_words(method: str) -> str:
    return {"lora": "LoRA", "qlora": "QLoRA", "lomo": "LOMO", "adalomo": "AdaLomo"}.get(method, method)


def short_name(model: ModelSpec) -> str:
    """``Llama-2-7b`` for meta-llama/Llama-2-7b-hf."""
    return model.name.rstrip("/").rsplit("/", 1)[-1].removesuffix("-hf")


def matrix_data(matrix: Matrix) -> dict[str, Any]:
    """The object that ``--json`` prints; a cell without a plan has rows longer than its model takes."""
    return {
        "hardware": {
            "gpu": matrix.hardware.gpu.name,
            "gpus": matrix.hardware.gpus_per_node,
            "nodes": matrix.hardware.nodes,
        },
        "models": [model.name for model in matrix.models],
        "context": list(matrix.seq_lens),
        "cells": [_cell_data(cell) for cell in matrix.cells],
    }


def _cell_data(cell: Cell) -> dict[str, Any]:
    settings = [
        {
            "method": setting.method,
            "sharding": setting.sharding,
            "recompute": setting.recompute,
            "offload": setting.offload,
            "fits": setting.fits,
        }
        for setting in cell.settings
    ]
    data = {"model": cell.model.name, "context": cell.seq_len, "fits": cell.fits, "settings": settings}
    if cell.taken is None:
        return {**data, "why": f"the model was made for {cell.model.max_seq_len} positions"}
    return {
        **data,
        "summary": describe_plan(cell.taken.plan),
        "plan": to_data(cell.taken.plan),
        "estimate": estimate_data(cell.taken.estimate),
    }
