"""Pictures of several runs in one (losses, peaks, speeds), and of several plans (the matrix)."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fitune.report.compare import Row
from fitune.report.plots import (
    SERIES,
    Axes,
    Points,
    axis_unit,
    bars_to_the_right,
    colour,
    draw_bar,
    draw_bar_label,
    draw_line,
    draw_svg,
    legend_above,
    logarithmic_if_wide,
    svg_file,
)
from fitune.report.run_plots import running_mean
from fitune.spec.plan import Plan, trains_every_weight
from fitune.spec.reports import StepReport
from fitune.units import format_bytes, format_rate

_SOLID, _DASHED = "-", (0, (5, 1.6))


def loss_curves(runs: Mapping[str, Sequence[StepReport]], plans: Mapping[str, Plan]) -> str:
    """Running means: single steps of several runs would hide one another."""
    curves = {name: running_mean([(step.step, step.loss) for step in steps]) for name, steps in runs.items()}
    return _curves(curves, plans, name="losses", label="Training loss of every method")


def held_out_curves(runs: Mapping[str, Sequence[StepReport]], plans: Mapping[str, Plan]) -> str:
    """SVG of the loss on held-out rows over the steps, in nats per token, a curve for each method."""
    curves = {
        name: [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]
        for name, steps in runs.items()
    }
    return _curves(curves, plans, name="held-out", label="Loss on the held-out rows of every method")


def peak_bars(peaks: Mapping[str, Row]) -> str:
    """Predicted and measured peak of every method."""
    unit, unit_name = axis_unit(int(_largest(peaks)))
    return _bars(
        peaks, unit=unit, axis=unit_name, text=lambda value: format_bytes(int(value)), name="peaks",
        label="Peak of tensors of every method",
    )  # fmt: skip


def speed_bars(speeds: Mapping[str, Row]) -> str:
    """Predicted and measured tokens a second of every method."""
    return _bars(
        speeds, unit=1, axis="tokens/s", text=format_rate, name="speeds", label="Speed of every method"
    )


def _bars(
    rows: Mapping[str, Row], *, unit: int, axis: str, text: Callable[[float], str], name: str, label: str
) -> str:
    def draw(axes: Axes) -> None:
        """Draws two bars for each method, predicted and measured; a value that is 0 or unknown has none."""
        for place, (method, row) in enumerate(rows.items()):
            sides = (("predicted", row.predicted, -0.19, "series-1"), ("measured", row.measured, 0.19, "ink"))
            for side, value, offset, fill in sides:
                if value:
                    tip = f"{method}: {text(value)}, {side}"
                    draw_bar(axes, place + offset, 0, value / unit, colour(fill), side, tip=tip)
                    draw_bar_label(axes, place + offset, value / unit, text(value))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        bars_to_the_right(axes, list(rows), most=(_largest(rows) or 1) / unit * 1.3, axis=axis)

    return draw_svg(draw, name=name, label=label, grid="x", height_in=0.9 + 0.5 * len(rows))


def _largest(rows: Mapping[str, Row]) -> float:
    return max(
        (value for row in rows.values() for value in (row.predicted, row.measured) if value), default=1
    )


def _curves(curves: Mapping[str, Points], plans: Mapping[str, Plan], *, name: str, label: str) -> str:
    """Solid where every weight is trained, dashed where adapters are."""
    finite = {method: [p for p in points if math.isfinite(p[1])] for method, points in curves.items()}

    def draw(axes: Axes) -> None:
        """Draws one curve for each method, with its points where there are fewer than 30."""
        for place, (method, points) in enumerate(finite.items()):
            style = _SOLID if trains_every_weight(plans[method].tuning) else _DASHED
            marker = "o" if len(points) < 30 else ""
            series = f"series-{1 + place % SERIES}"
            draw_line(axes, points, series, method, width=1.6, marker=marker, style=style)
        logarithmic_if_wide(axes, [loss for points in finite.values() for _, loss in points])
        axes.set_ylabel("nats per token")
        legend_above(axes)

    return draw_svg(draw, name=name, label=label, height_in=3.4, curves=curves)


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
    lines = max(len(card.lines) for row in cards for card in row) + 3
    size = 1.5 + 2.2 * len(columns), 1 + 0.19 * lines * len(rows)
    with svg_file(path, name="matrix", what="the picture of a matrix", size=size, font_size=8.5) as figure:
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


def _draw_card(axes: Any, card: Card, *, x: float, y: float, line: float) -> None:
    """A panel with an edge in the method's colour, a bar for the memory, and the words."""
    from matplotlib.patches import Rectangle

    colour = _COLOURS.get(card.method, _BAD if card.filled else _BAR)
    axes.add_patch(Rectangle((x, y), 0.94, 0.94, color=_PANEL, lw=0))
    axes.add_patch(Rectangle((x, y), 0.02, 0.94, color=colour, lw=0))
    axes.text(x + 0.06, y + 1.2 * line, card.title, fontweight="bold", fontsize=8)
    if card.filled:
        axes.add_patch(Rectangle((x + 0.06, y + 1.5 * line), 0.82, 0.4 * line, color=_BAR, lw=0))
        width = 0.82 * min(card.filled, 1)
        axes.add_patch(Rectangle((x + 0.06, y + 1.5 * line), width, 0.4 * line, color=colour, lw=0))
    for number, words in enumerate(card.lines):
        aligned = words.replace(" ", "\N{NO-BREAK SPACE}")  # SVG draws several spaces as one
        axes.text(x + 0.06, y + (number + 2.8) * line, aligned, family="monospace", fontsize=7)
