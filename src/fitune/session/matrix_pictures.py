"""A matrix as plain words for the picture, and the file."""

from pathlib import Path

from fitune.errors import RecipeError
from fitune.planner.matrix import Cell, Matrix
from fitune.planner.matrix_words import method_words, short_name, short_of, taken_words
from fitune.report.matrix_picture import Card, MatrixPicture, Need, draw_matrix
from fitune.spec.parameters import count_parameters
from fitune.spec.reports import Priced
from fitune.spec.words import devices_with_memory, method_name
from fitune.units import format_bytes, format_count, format_rate

_COLOURS = {
    "full": "series-1",
    "lora": "series-3",
    "qlora": "series-2",
    "lomo": "series-4",
    "adalomo": "series-5",
}
_NEEDS: dict[tuple[str, ...] | None, Need] = {
    (): "nothing",
    ("recompute",): "recompute",
    ("offload",): "offload",
    ("recompute", "offload"): "both",
    None: "too much",
}


def write_picture(matrix: Matrix, path: Path) -> None:
    """Raises RecipeError for a name that is no SVG's."""
    if path.suffix.lower() != ".svg":
        raise RecipeError(
            f"--picture {path} is no .svg, the one kind that is drawn", hint="--picture matrix.svg"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw_matrix(picture_of(matrix)), encoding="utf-8")


def picture_of(matrix: Matrix) -> MatrixPicture:
    return MatrixPicture(
        title=f"What fits on {devices_with_memory(matrix.hardware)}",
        rows=tuple(
            (short_name(model), f"{format_count(count_parameters(model).total)} parameters")
            for model in matrix.models
        ),
        columns=tuple(f"{length:,} tokens" for length in matrix.seq_lens),
        cards=tuple(tuple(_card(cell, matrix) for cell in matrix.row(model)) for model in matrix.models),
        methods=tuple(method_words(method) for method in matrix.methods),
        shardings=matrix.shardings,
    )


def _card(cell: Cell, matrix: Matrix) -> Card:
    if cell.taken is None:
        longest = f"rows of at most {cell.model.max_seq_len:,}"
        return Card(title="no such rows", lines=("the model was made for", longest), colour="line", filled=0)
    needs = tuple(
        tuple(_NEEDS[cell.needs(method, sharding)] for sharding in matrix.shardings)
        for method in matrix.methods
    )
    estimate = cell.taken.estimate
    return Card(
        title=_title(cell.taken),
        lines=_lines(cell.taken),
        colour=_COLOURS[method_name(cell.taken.plan.tuning)] if estimate.fits else "bad",
        filled=estimate.peak_bytes / estimate.usable_bytes,
        needs=needs,
    )


def _title(taken: Priced) -> str:
    method, sharding, *_ = taken_words(taken)
    return f"{method} · {sharding}" if taken.estimate.fits else "nothing fits"


def _lines(taken: Priced) -> tuple[str, ...]:
    _, _, blocks, host, peak, _ = taken_words(taken)
    estimate = taken.estimate
    last = format_rate(estimate.tokens_per_second) if estimate.fits else f"{short_of(estimate)} is missing"
    return (
        f"{peak} of {format_bytes(estimate.usable_bytes)}",
        f"{blocks} blocks recomputed",
        f"on the host: {host}" if host != "–" else "nothing on the host",
        last,
    )
