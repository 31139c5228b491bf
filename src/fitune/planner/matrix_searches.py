"""Searches beside a cell's own: LoRA on a 16-bit base with other pins, activations on the device."""

from collections.abc import Iterator

from fitune.estimate.memory import memory_of
from fitune.planner.matrix import Cell, Matrix, compared, of_cell
from fitune.planner.method_search import MethodSearch
from fitune.spec.recipe import Recipe
from fitune.spec.words import method_name


def share_of_fastest(recipe: Recipe, cell: Cell, matrix: Matrix) -> float | None:
    """Speed of ZeRO-2 + LoRA as a share of the fastest LoRA's, both with all states on the devices."""
    on_device = {"offload_parameters": "device", "offload_optimizer": "device"}
    two = _best_speed(recipe, cell, matrix, zero=2, **on_device)
    fastest = _best_speed(recipe, cell, matrix, **on_device)
    return two / fastest if two and fastest else None


def _best_speed(recipe: Recipe, cell: Cell, matrix: Matrix, **pins: object) -> float:
    """Tokens per second; 0 when nothing fits."""
    found = [plan for one in _lora(recipe, cell, matrix, **pins) for plan in one.fastest()]
    return max((plan.tokens_per_second for plan in found), default=0.0)


def least_bytes(recipe: Recipe, cell: Cell, matrix: Matrix, **pins: object) -> int | None:
    """The smallest peak of a device, whether it fits or not; None when the pins leave no way."""
    steps = [step for one in _lora(recipe, cell, matrix, **pins) if (step := one.smallest()) is not None]
    return min((memory_of(step).peak_bytes for step in steps), default=None)


def _lora(recipe: Recipe, cell: Cell, matrix: Matrix, **pins: object) -> Iterator[MethodSearch]:
    wanted = of_cell(recipe, cell.model, cell.seq_len)
    wanted = wanted.model_copy(update={"offload_activations": "device", **pins})
    for method in compared(wanted, cell.model, matrix.hardware):
        if method_name(method.tuning) == "lora":
            yield MethodSearch(wanted, method, cell.model, matrix.hardware)
