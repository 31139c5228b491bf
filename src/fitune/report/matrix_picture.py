"""The optimisation matrix as a picture: models down, lengths of rows across, one card for each cell."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fitune.errors import MissingExtra

_COLOURS = {
    "full": "#0072b2", "lora": "#009e73", "qlora": "#e69f00", "lomo": "#cc79a7", "adalomo": "#56b4e9",
}  # fmt: skip
"""Okabe and Ito's: told apart with every kind of colour vision."""
_BAD, _PANEL, _BAR = "#b23c00", "#f3f5f7", "#cfd5da"


class Card(NamedTuple):
    """One cell: words about the plan that is taken, and how full it fills a device."""

    title: str
    lines: tuple[str, ...]
    method: str
    """Decides the colour; empty where nothing fits."""
    filled: float
    """Peak as a share of what is usable; above 1 it does not fit, 0 draws no bar."""


def draw_matrix(
    path: Path,
    cards: Sequence[Sequence[Card]],
    *,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    legend: str,
) -> None:
    """Write the picture as SVG; ``rows`` and ``columns`` head the cards. Raises MissingExtra without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("the picture of a matrix", extra="plots") from None
    lines = max(len(card.lines) for row in cards for card in row) + 3
    height = 0.19 * lines
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "matrix", "font.size": 8.5}):
        figure = Figure(figsize=(1.5 + 2.2 * len(columns), 1 + height * len(rows)), layout="constrained")
        axes = figure.add_subplot(xlim=(-0.7, len(columns)), ylim=(len(rows) + 0.25, -0.35))
        axes.set_axis_off()
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
        for place, name in enumerate(columns):
            axes.text(place + 0.5, -0.1, name, ha="center", fontweight="bold")
        for number, name in enumerate(rows):
            axes.text(-0.05, number + 0.5, name, ha="right", va="center", fontweight="bold")
            for place, card in enumerate(cards[number]):
                _draw_card(axes, card, x=place + 0.03, y=number + 0.03, line=0.94 / lines)
        axes.text(0, len(rows) + 0.15, legend, wrap=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_card(axes: Any, card: Card, *, x: float, y: float, line: float) -> None:
    """A panel with an edge in the method's colour, a bar for the memory, and the words."""
    from matplotlib.patches import Rectangle

    colour = _COLOURS.get(card.method, _BAD if card.filled else _BAR)
    axes.add_patch(Rectangle((x, y), 0.94, 0.94, color=_PANEL, lw=0))
    axes.add_patch(Rectangle((x, y), 0.02, 0.94, color=colour, lw=0))
    axes.text(x + 0.06, y + 1.2 * line, card.title, fontweight="bold")
    if card.filled:
        axes.add_patch(Rectangle((x + 0.06, y + 1.5 * line), 0.82, 0.4 * line, color=_BAR, lw=0))
        width = 0.82 * min(card.filled, 1)
        axes.add_patch(Rectangle((x + 0.06, y + 1.5 * line), width, 0.4 * line, color=colour, lw=0))
    for number, words in enumerate(card.lines):
        axes.text(x + 0.06, y + (number + 2.8) * line, words, family="monospace", fontsize=7)
