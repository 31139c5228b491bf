"""Models × lengths of rows: the plan taken for each, and their picture."""

from collections.abc import Sequence
from pathlib import Path

from fitune.errors import RecipeError
from fitune.planner.matrix import LEGEND, Matrix, card, matrix, short_name
from fitune.report.matrix_picture import Card, draw_matrix
from fitune.session.planning import wanted_hardware
from fitune.spec.model_config import load_model_spec
from fitune.spec.recipe import Recipe
from fitune.spec.words import devices_with_memory


def plan_matrix(recipe: Recipe, *, models: Sequence[str], seq_lens: Sequence[int]) -> Matrix:
    """Plan every model with every length of rows. Raises RecipeError for pins that contradict each other."""
    specs = [load_model_spec(name) for name in models]
    return matrix(recipe, models=specs, seq_lens=tuple(seq_lens), hardware=wanted_hardware(recipe))


def draw_picture(found: Matrix, path: Path) -> None:
    """Write the matrix as SVG. Raises RecipeError for another ending, MissingExtra without matplotlib."""
    if path.suffix.lower() != ".svg":
        raise RecipeError(f"--picture {path} must end in .svg", hint="--picture matrix.svg")
    draw_matrix(
        path,
        [[Card(*card(cell, found)) for cell in found.row(model)] for model in found.models],
        title=f"What fits on {devices_with_memory(found.hardware)}",
        rows=[short_name(model) for model in found.models],
        columns=[f"{length:,} tokens" for length in found.seq_lens],
        legend=f"{', '.join(found.shardings)}: {LEGEND}",
    )
