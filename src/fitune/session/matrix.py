"""Plans of many models and many lengths of rows; the two axes are read as people write them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fitune.errors import RecipeError
from fitune.planner.matrix import LEGEND, Matrix, card, matrix, short_name
from fitune.session.planning import wanted_hardware
from fitune.spec.model.model_config import load_model_spec
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import devices_with_memory

_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]", re.IGNORECASE)


def full_names(models: str) -> Iterator[str]:
    """``llama-2-7b,13b``: a size alone stands for the model before it in that size.

    Raises RecipeError for no names, and for a size that follows no name with a size in it.
    """
    before = ""
    words = [word.strip() for word in models.split(",") if word.strip()]
    if not words:
        raise RecipeError("--models names no model", hint="--models llama-2-7b,13b,70b")
    for word in dict.fromkeys(words):
        if _SIZE.fullmatch(word):
            sizes = list(_SIZE.finditer(before))
            if not sizes:
                raise RecipeError(
                    f"--models: {word} is a size, and no model with a size is named before it",
                    hint="--models llama-2-7b,13b,70b",
                )
            word = before[: sizes[-1].start()] + word + before[sizes[-1].end() :]
        yield word
        before = word


def row_lengths(context: str) -> tuple[int, ...]:
    """Whole numbers of tokens. Raises RecipeError for anything else."""
    words = [word.strip() for word in context.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(
            f"--context {context!r} is not a list of token counts", hint="--context 512,1024,2048"
        )
    return tuple(int(word) for word in words)


def plan_matrix(recipe: Recipe, *, models: Sequence[str], seq_lens: Sequence[int]) -> Matrix:
    """Plan every model with every length of rows. Raises RecipeError for pins that contradict each other."""
    specs = [load_model_spec(name) for name in models]
    return matrix(recipe, models=specs, seq_lens=tuple(seq_lens), hardware=wanted_hardware(recipe))


def draw_picture(found: Matrix, path: Path) -> None:
    """Write the matrix as SVG. Raises RecipeError for another ending, MissingExtra without matplotlib."""
    if path.suffix.lower() != ".svg":
        raise RecipeError(f"--picture {path} must end in .svg", hint="--picture matrix.svg")
    from fitune.report.comparison_plots import Card, draw_matrix  # not for those who only plan

    draw_matrix(
        path,
        [[Card(*card(cell, found)) for cell in found.row(model)] for model in found.models],
        title=f"What fits on {devices_with_memory(found.hardware)}",
        rows=[short_name(model) for model in found.models],
        columns=[f"{length:,} tokens" for length in found.seq_lens],
        legend=f"{', '.join(found.shardings)}: {LEGEND}",
    )
