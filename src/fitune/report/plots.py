"""Pictures as inline SVG by matplotlib (extra ``plots``): axes, bars, lines and their colours.

Colours are CSS variables of the page (``--ink``, ``--series-1`` …), so one picture reads in light and in dark mode.
matplotlib knows no variables: it draws with stand-in colours that are replaced afterwards. Text stays text, in the
page's font. Beside its drawing a picture holds what ``templates/hover.js`` says of it: the points of its curves in
``data-curves``, the words of a bar in ``data-tip``.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fitune.errors import MissingExtra
from fitune.units import GIB, KIB, MIB, format_number

SERIES = 8
"""Colours for the terms of the memory bars: Okabe and Ito's set, then grey."""
_STAND_INS = {
    name: f"#0000{number:02x}" for number, name in enumerate(("ink", "muted", "line", "surface"), start=1)
} | {f"series-{number}": f"#0001{number:02x}" for number in range(1, SERIES + 1)}
_WIDTH_IN = 4.9

Axes = Any  # matplotlib is optional and untyped here
Points = Sequence[tuple[int, float]]
"""Steps and values."""


def colour(name: str) -> str:
    """The stand-in for a variable of the page."""
    return _STAND_INS[name]


@contextmanager
def svg_file(
    path: Path, *, name: str, what: str, size: tuple[float, float], font_size: float
) -> Iterator[Any]:
    """An empty figure of ``size`` in inches that is written to ``path`` at the end. Raises MissingExtra, naming
    ``what`` is drawn, without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra(what, extra="plots") from None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": font_size}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn.getvalue().replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")


_DARK = (
    "@media (prefers-color-scheme: dark) { text { fill: #e7eaed }\n"
    + "\n".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }}'
        for kind, light, dark in (
            ("fill", "#ffffff", "#131518"), ("fill", "#f3f5f7", "#1f2329"), ("fill", "#cfd5da", "#3d454d"),
            ("fill", "#8a939b", "#9ba4ae"), ("fill", "#22272b", "#e7eaed"), ("stroke", "#e6e9ec", "#2a3037"),
            ("stroke", "#000000", "#9ba4ae"), ("fill", "#0072b2", "#4ba3dc"), ("stroke", "#0072b2", "#4ba3dc"),
        )
    )
    + "}\n"
)  # fmt: skip
"""What a picture in a file does where its reader's screen is dark: paper, panels, words and lines change; the hues of
methods stay, the blue one lighter."""


def draw_svg(
    draw: Callable[[Axes], None], *, name: str, label: str, grid: str = "y", height_in: float = 2.7,
    left_in: float = 0.0, curves: Mapping[str, Points] | None = None, text: Callable[[float], str] = format_number,
) -> str:  # fmt: skip
    """Call ``draw`` with empty axes; ``grid`` is the axis of the values: ``y`` over steps, ``x`` for bars.

    ``left_in``: room for one line of labels on the left, where it is known: matplotlib finds it by drawing twice.
    ``curves``: those whose values a reader can point at, by name, written by ``text``.
    Raises MissingExtra without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise MissingExtra("pictures in the report", extra="plots") from None
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9,
        "axes.labelcolor": colour("muted"),
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout=None if left_in else "constrained")
        axes = figure.add_subplot()
        if left_in:
            edge, below = 0.1, 0.5
            figure.subplots_adjust(
                left=left_in / _WIDTH_IN, right=1 - edge / _WIDTH_IN, bottom=below / height_in, top=1 - edge / height_in
            )  # fmt: skip
        _quiet(axes, grid)
        if grid == "y":
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        inside, last = _pointed_at(axes, curves or {}, text)
    return _inline(buffer.getvalue(), label + last, inside)


def _pointed_at(axes: Axes, curves: Mapping[str, Points], text: Callable[[float], str]) -> tuple[str, str]:
    """The attribute ``data-curves`` of a picture, and the last values in words; both empty without a finite value.

    It is JSON in the units of the picture: ``at`` + ``scale`` · step is a point's place from the left, ``top`` and
    ``bottom`` are those of the axes; of each curve its name and its points as (step, place from the top, words).
    """
    finite = {name: [one for one in points if math.isfinite(one[1])] for name, points in curves.items()}
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return "", ""
    from jinja2.utils import htmlsafe_json_dumps

    width, height = (72 * inches for inches in axes.figure.get_size_inches())
    shares = axes.transData - axes.figure.transFigure
    found = []
    for name, points in finite.items():
        kept = thin_evenly(points)
        tops = height * (1 - shares.transform(kept)[:, 1])
        found.append(
            (
                name,
                [(step, round(top, 1), text(value)) for (step, value), top in zip(kept, tops, strict=True)],
            )
        )
    at, beside = (width * shares.transform((step, axes.get_ylim()[1]))[0] for step in (0, 1))
    box = axes.get_position()
    top, bottom = height * (1 - box.y1), height * (1 - box.y0)
    data = {"at": at, "scale": beside - at, "top": top, "bottom": bottom, "curves": found}
    last = "; ".join(f"{name} {points[-1][2]} in step {points[-1][0]}" for name, points in found)
    return f" data-curves='{htmlsafe_json_dumps(data)}'", f": {last}"


def _quiet(axes: Axes, grid: str) -> None:
    """Light grid lines across the values, no frame."""
    for side, spine in axes.spines.items():
        spine.set_visible(side == ("bottom" if grid == "y" else "left"))
        spine.set_color(colour("line"))
    axes.grid(axis=grid, color=colour("line"), linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=colour("muted"))


def _inline(svg: str, label: str, inside: str) -> str:
    """Only the element, as wide as its place, with variables for colours and without ids nobody refers to; the
    keyboard reaches what can be pointed at."""
    from markupsafe import escape

    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s(?:xmlns(?::xlink)?|version)=\"[^\"]*\"|font-family: [^;]*; ", "", svg).replace(
        "xlink:href", "href"
    )
    size = r'(<svg[^>]*?)\s(?:width|height)="[^"]*"'
    svg = re.sub(size, r"\1", re.sub(size, r"\1", svg, count=1), count=1)
    svg = svg.replace(f' id="{_TIP}', ' data-tip="')
    inside += ' tabindex="0"' * (bool(inside) or "data-tip" in svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"{inside}', 1)
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda match: match.group(0) if match.group(1) in used else "", svg)
    for name, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg


_POINTS = 600
"""More points than a picture has pixels only make the file larger."""


def thin(points: Points) -> list[tuple[int, float]]:
    """Not many more than ``_POINTS`` points: the lowest and highest of each stretch, so no spike is lost."""
    if len(points) <= _POINTS:
        return list(points)
    size = -(-2 * len(points) // _POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        kept += sorted({lowest, highest})
    return kept


_POINTED_AT = 400
"""Points of a curve that a reader can point at: one for each pixel of a picture of usual width."""


def thin_evenly(points: Points) -> Points:
    """At most ``_POINTED_AT`` points, as far from each other as from the next; first, last, lowest and highest stay."""
    last = len(points) - 1
    if last < _POINTED_AT:
        return points
    kept = {place * last // (_POINTED_AT - 3) for place in range(_POINTED_AT - 2)}
    kept |= {one(range(last + 1), key=lambda place: points[place][1]) for one in (min, max)}
    return [points[place] for place in sorted(kept)]


_TIP = "tip "
"""Begins the id of a bar, which is all that matplotlib lets through, where it has words."""


def draw_bar(
    axes: Axes, place: float, start: float, length: float, fill: str, label: str, *, tip: str
) -> None:
    """A horizontal bar in the colour ``fill``, on the line ``place``; who points at it reads ``tip``."""
    axes.barh(
        place, length, left=start, height=0.34, color=fill, label=label, edgecolor=colour("surface"), linewidth=0.6,
        gid=f"{_TIP}{tip}",
    )  # fmt: skip


def draw_bar_label(axes: Axes, place: float, length: float, text: str) -> None:
    """``text`` at the end of a bar of that length."""
    axes.annotate(
        text, (length, place), xytext=(4, 0), textcoords="offset points", va="center", color=colour("ink"),
        fontsize=8.5,
    )  # fmt: skip


def bars_to_the_right(axes: Axes, names: Sequence[str], *, most: float, axis: str) -> None:
    """Axes of horizontal bars: their names from the top down, and ``axis`` with room for the labels at their ends."""
    axes.set_yticks(range(len(names)), list(names))
    axes.set_xlim(0, most)
    axes.set_xlabel(axis)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=colour("ink"))
    legend_above(axes)


def axis_unit(largest: int) -> tuple[int, str]:
    """Bytes and name of the largest unit (GiB, MiB, KiB, else bytes) that is at most ``largest`` bytes."""
    return next(
        (unit for unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if largest >= unit[0]), (1, "bytes")
    )


def draw_line(
    axes: Axes,
    points: Points,
    series: str,
    label: str,
    *,
    width: float,
    alpha: float = 1,
    marker: str = "",
    style: object = "-",
) -> None:
    """Draws ``points`` (step, value) in the colour of ``series``, thinned; a single one as a dot."""
    finite = thin([point for point in points if math.isfinite(point[1])])
    marker = marker or ("o" if len(finite) == 1 else "")
    axes.plot(
        [x for x, _ in finite], [y for _, y in finite], color=colour(series), label=label, linewidth=width,
        alpha=alpha, marker=marker, markersize=3.5, linestyle=style,
    )  # fmt: skip


def mark_not_finite(axes: Axes, points: Points) -> None:
    """A cross at the upper edge for every value that no axis can show."""
    steps = [step for step, value in points if not math.isfinite(value)]
    if steps:
        axes.plot(
            steps, [1.0] * len(steps), "x", color=colour("series-6"), transform=axes.get_xaxis_transform(),
            clip_on=False, markersize=6, label="not finite",
        )  # fmt: skip


MANY_TIMES = 3
"""Losses that differ by more than this are drawn on a logarithmic axis: else the end of every curve is one line."""


def logarithmic_if_wide(axes: Axes, losses: Sequence[float]) -> None:
    """Makes the axis logarithmic where the largest loss is over MANY_TIMES the smallest and all are positive."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite or min(finite) <= 0 or max(finite) <= MANY_TIMES * min(finite):
        return
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log", subs=[])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def legend_above(axes: Axes) -> None:
    """Puts the legend above the axes, each label once; a single label needs none."""
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(sorted(zip(labels, handles, strict=True), key=lambda entry: entry[0] == "measured"))
    if len(unique) > 1:
        axes.figure.legend(
            unique.values(), unique.keys(), loc="outside upper left", ncols=min(len(unique), 3),
            frameon=False, fontsize=9, labelcolor=colour("ink"), handlelength=1.2, columnspacing=1.4,
            borderaxespad=0.2,
        )  # fmt: skip
