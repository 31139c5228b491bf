"""The picture of a fleet: time against cost of the whole job, a point for each cluster and number of nodes."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fitune.report.plots import svg_file

_INK, _MUTED, _LINE = "#22272b", "#8a939b", "#0072b2"
_TAKEN, _OTHER = "#d55e00", "#b9c0c6"
_ROOM = 1.35
"""Free space around the points, as a factor of both logarithmic axes."""
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_TICKS = [
    *(n * _MINUTE for n in (1, 2, 5, 10, 20, 30)), *(n * _HOUR for n in (1, 2, 4, 8, 12)),
    *(n * _DAY for n in (1, 2, 4, 7, 14, 30, 90)),
]  # fmt: skip


class Point(NamedTuple):
    """One offer."""

    name: str
    seconds: float
    cost: float
    """US dollars."""
    is_on_frontier: bool
    is_taken: bool


def draw_frontier(path: Path, points: Sequence[Point], *, title: str) -> None:
    """Write the picture as SVG. Raises MissingExtra without matplotlib."""
    with svg_file(path, name="fleet", what="the picture of a fleet", size=(7.4, 4.4), font_size=9) as figure:
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

        axes = figure.add_subplot(xscale="log", yscale="log")
        axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axes.set_xlabel("the whole job, from free nodes to the end", color=_MUTED)
        axes.set_ylabel("cost, US dollars", color=_MUTED)
        axes.xaxis.set_major_locator(FixedLocator(_TICKS))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"${value:,g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        for name in ("seconds", "cost"):
            values = [getattr(point, name) for point in points]
            limits = min(values) / _ROOM, max(values) * _ROOM * (1.5 if name == "seconds" else 1)
            (axes.set_xlim if name == "seconds" else axes.set_ylim)(*limits)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, labelcolor=_MUTED)
        axes.grid(color="#e6e9ec", linewidth=0.7)
        axes.set_axisbelow(True)
        _draw(axes, points)


def _draw(axes: Any, points: Sequence[Point]) -> None:
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
    _label(axes, points, best)


_PLACES = [(7, -3), (7, 6), (7, -12), (-7, -3), (-7, 6), (-7, -12), (7, 15), (7, -21), (-7, 15), (-7, -21), (7, 24),
           (7, -30)]  # fmt: skip
"""Offsets of a label that begins, or ends to the left of its point, in points of type; the first free one is taken."""


def _label(axes: Any, points: Sequence[Point], best: Sequence[Point]) -> None:
    """Names beside the points, those of the frontier first: over no other name, point, or line of the frontier."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    places = {point: axes.transData.transform((point.seconds, point.cost)) for point in points}
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places.values()]
    for one, other in pairwise(best):
        (x, y), (to_x, to_y) = places[one], places[other]
        taken += [Bbox.from_extents(x, y - 1, to_x, y + 1), Bbox.from_extents(to_x - 1, to_y, to_x + 1, y)]
    for point in sorted(points, key=lambda each: (not each.is_taken, not each.is_on_frontier)):
        text = axes.annotate(
            f"{point.name}{' (taken)' if point.is_taken else ''}", (point.seconds, point.cost), xytext=(0, 0),
            textcoords="offset points", color=_INK, fontweight="bold" if point.is_taken else "normal", fontsize=8.5,
        )  # fmt: skip
        hits = []
        for number, offset in enumerate(_PLACES):
            text.set_ha("left" if offset[0] > 0 else "right")
            text.set_position(offset)
            box = text.get_window_extent()
            outside = not (axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 + 20 and axes.bbox.y0 <= box.y0)
            hits.append((outside, box.count_overlaps(taken), number))
        offset = _PLACES[min(hits)[2]]
        text.set_ha("left" if offset[0] > 0 else "right")
        text.set_position(offset)
        taken.append(text.get_window_extent())


def _tick(seconds: float) -> str:
    """``20 min``, ``4 h``, ``2 d``: ticks are whole numbers of a unit."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"
