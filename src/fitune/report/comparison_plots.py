"""Pictures of several runs in one (losses, peaks, speeds), of several plans (the matrix), and of a fleet's offers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fitune.report.compare import Figure
from fitune.report.plots import DASHED, SERIES, Curve, Points, loss_picture, paired_bars, svg_file
from fitune.report.run_plots import running_mean
from fitune.values.plan import Plan, trains_every_weight
from fitune.values.reports import StepReport


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


def _curves(curves: Mapping[str, Points], plans: Mapping[str, Plan], *, name: str, label: str) -> str:
    """Solid where every weight is trained, dashed where adapters are; with their points where they are few."""
    lines = [
        Curve(
            name=method, points=points, series=f"series-{1 + place % SERIES}", marker="o" if len(points) < 30 else "",
            style="-" if trains_every_weight(plans[method].tuning) else DASHED,
        )
        for place, (method, points) in enumerate(curves.items())
    ]  # fmt: skip
    return loss_picture(lines, name=name, label=label, height_in=3.4)


def method_bars(rows: Mapping[str, Figure], *, name: str, label: str) -> str:
    """SVG of a quantity of every method, predicted and measured; a value that is 0 or unknown has no bar."""
    bars = {
        method: ({"predicted": row.predicted} if row.predicted else {}, row.measured or None)
        for method, row in rows.items()
    }
    return paired_bars(bars, unit=next(iter(rows.values())).unit, name=name, label=label)


_COLOURS = {
    "full": "#0072b2", "lora": "#009e73", "qlora": "#e69f00", "lomo": "#cc79a7", "adalomo": "#56b4e9",
}  # fmt: skip
"""Okabe and Ito's: told apart with every kind of colour vision."""
_BAD, _PANEL, _BAR = "#b23c00", "#f3f5f7", "#cfd5da"


class MatrixCard(NamedTuple):
    """One cell: words about the plan that is taken, and how full it fills a device."""

    title: str
    lines: tuple[str, ...]
    method: str
    """Decides the colour; empty where nothing fits."""
    filled: float
    """Peak as a share of what is usable; above 1 it does not fit, 0 draws no bar."""


def draw_matrix(
    path: Path,
    cards: Sequence[Sequence[MatrixCard]],
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


def _draw_card(axes: Any, card: MatrixCard, *, x: float, y: float, line: float) -> None:
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


_INK, _MUTED, _LINE = "#22272b", "#8a939b", "#0072b2"
_TAKEN, _OTHER = "#d55e00", "#b9c0c6"
_ROOM = 1.35
"""Free space around the points, as a factor of both logarithmic axes."""
_TICKS = {
    **{n * 60.0: f"{n} min" for n in (1, 2, 5, 10, 20, 30)},
    **{n * 3600.0: f"{n} h" for n in (1, 2, 4, 8, 12)},
    **{n * 86_400.0: f"{n} d" for n in (1, 2, 4, 7, 14, 30, 90)},
}
"""Seconds -> words."""


class OfferPoint(NamedTuple):
    """A cluster and a number of its nodes: time and cost of the whole job."""

    name: str
    seconds: float
    cost: float
    """US dollars."""
    is_on_frontier: bool
    is_taken: bool


def draw_frontier(path: Path, points: Sequence[OfferPoint], *, title: str) -> None:
    """Write time against cost of each offer as SVG. Raises MissingExtra without matplotlib."""
    with svg_file(path, name="fleet", what="the picture of a fleet", size=(7.4, 4.4), font_size=9) as figure:
        from matplotlib.ticker import LogLocator

        axes = figure.add_subplot(xscale="log", yscale="log")
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axes.set_xlabel("the whole job, from free nodes to the end", color=_MUTED)
        axes.set_ylabel("cost, US dollars", color=_MUTED)
        axes.set_xticks([*_TICKS], [*_TICKS.values()])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(lambda value, _: f"${value:,g}")
        axes.minorticks_off()
        seconds, costs = [point.seconds for point in points], [point.cost for point in points]
        axes.set_xlim(min(seconds) / _ROOM, max(seconds) * _ROOM * 1.5)
        axes.set_ylim(min(costs) / _ROOM, max(costs) * _ROOM)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, labelcolor=_MUTED)
        axes.grid(color="#e6e9ec", linewidth=0.7)
        axes.set_axisbelow(True)
        _draw_offers(axes, points)


def _draw_offers(axes: Any, points: Sequence[OfferPoint]) -> None:
    best = sorted((point for point in points if point.is_on_frontier), key=lambda point: point.seconds)
    axes.step(
        [point.seconds for point in best], [point.cost for point in best], where="post", color=_LINE, linewidth=1.4,
        label="nothing is both faster and cheaper",
    )  # fmt: skip
    for point in points:
        colour = _TAKEN if point.is_taken else _LINE if point.is_on_frontier else _OTHER
        axes.plot(
            point.seconds, point.cost, marker="o", markersize=8 if point.is_taken else 6, color=colour, lw=0
        )
    axes.figure.legend(loc="outside lower right", frameon=False, labelcolor=_MUTED)
    _label(axes, points)


_PLACES = [(7, -3), (7, 6), (7, -12), (-7, -3), (-7, 6), (-7, -12), (7, 15), (7, -21), (-7, 15), (-7, -21), (7, 24),
           (7, -30)]  # fmt: skip
"""Offsets of a label that begins, or ends to the left of its point, in points of type; the first free one is taken."""


def _label(axes: Any, points: Sequence[OfferPoint]) -> None:
    """Names beside the points, those of the frontier first: over no other name or point."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    places = axes.transData.transform([(point.seconds, point.cost) for point in points])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places]
    for point in sorted(points, key=lambda each: (not each.is_taken, not each.is_on_frontier)):
        text = axes.annotate(
            f"{point.name}{' (taken)' if point.is_taken else ''}", (point.seconds, point.cost), xytext=(0, 0),
            textcoords="offset points", color=_INK, fontweight="bold" if point.is_taken else "normal", fontsize=8.5,
        )  # fmt: skip

        def put(place: tuple[int, int], text: Any = text) -> tuple[bool, int]:
            """Puts the name at ``place``. True where it leaves the picture, and the number of things that it covers."""
            text.set_ha("left" if place[0] > 0 else "right")
            text.set_position(place)
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 + 20 and axes.bbox.y0 <= box.y0
            return not inside, box.count_overlaps(taken)

        put(min(_PLACES, key=put))
        taken.append(text.get_window_extent())
