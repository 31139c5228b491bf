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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.errors import MissingExtra, RecipeError
from fitune.report.compare import Unit, value_text
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
    """An empty figure of ``size`` in inches that is written to ``path`` at the end. Raises RecipeError for a path of
    another ending than .svg, MissingExtra, naming ``what`` is drawn, without matplotlib."""
    if path.suffix.lower() != ".svg":
        raise RecipeError(f"--picture {path} must end in .svg", hint=f"--picture {name}.svg")
    with _empty_figure(name=name, what=what, size=size, font_size=font_size) as figure:
        yield figure
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn.getvalue().replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")


@contextmanager
def _empty_figure(
    *,
    name: str,
    what: str,
    size: tuple[float, float],
    font_size: float = 9,
) -> Iterator[Any]:
    """Inside, matplotlib draws and saves it as this project's SVG: text as text, equal pictures as equal files."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra(what, extra="plots") from None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": font_size}):
        yield Figure(figsize=size, layout="constrained")


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
    curves: Mapping[str, Points] | None = None, text: Callable[[float], str] = format_number,
) -> str:  # fmt: skip
    """Call ``draw`` with empty axes; ``grid`` is the axis of the values: ``y`` over steps, ``x`` for bars.

    ``curves``: those whose values a reader can point at, by name, written by ``text``.
    Raises MissingExtra without matplotlib.
    """
    size = (_WIDTH_IN, height_in)
    with _empty_figure(name=name, what="pictures in the report", size=size) as figure:
        from matplotlib.ticker import MaxNLocator

        axes = figure.add_subplot()
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
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(colour("muted"))


def _inline(svg: str, label: str, inside: str) -> str:
    """Only the element, as wide as its place, with variables for colours and without ids nobody refers to; the
    keyboard reaches what can be pointed at."""
    from markupsafe import Markup, escape

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
    return Markup(svg)


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


Bars = Mapping[str, tuple[Mapping[str, float], float | None]]
"""Name of a row -> its predicted parts by name, and the measured value; None where there is none."""


def paired_bars(rows: Bars, *, unit: Unit, name: str, label: str) -> str:
    """SVG of two bars for each row: the predicted parts end to end, and below them the measured value in one piece.
    Who points at a part reads its value."""
    largest = max(
        [value for parts, measured in rows.values() for value in (sum(parts.values()), measured or 0)],
        default=0,
    )
    divisor, axis = axis_unit(int(largest)) if unit == "bytes" else (1, unit)
    names = dict.fromkeys(part for parts, _ in rows.values() for part in parts)
    colours = {part: colour(f"series-{number}") for number, part in enumerate(names, start=1)}

    def draw(axes: Axes) -> None:
        """Draws the bars from the top down, each with its value at its end."""
        for place, (row, (parts, measured)) in enumerate(rows.items()):
            own = {} if measured is None else {"measured": measured}
            for side, offset, values in (("predicted", -0.19, parts), ("measured", 0.19, own)):
                end = 0.0
                for part, value in values.items():
                    words = value_text(value, unit) if part == side else f"{part} {value_text(value, unit)}"
                    axes.barh(
                        place + offset, value / divisor, left=end, height=0.34, label=part, linewidth=0.6,
                        color=colours.get(part, colour("ink")), edgecolor=colour("surface"),
                        gid=f"{_TIP}{row}: {words}, {side}",
                    )  # fmt: skip
                    end += value / divisor
                if values:
                    axes.annotate(
                        value_text(sum(values.values()), unit), (end, place + offset), xytext=(4, 0), va="center",
                        textcoords="offset points", color=colour("ink"), fontsize=8.5,
                    )  # fmt: skip
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_xlim(0, (largest or 1) / divisor * 1.3)
        axes.set_xlabel(axis)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelcolor=colour("ink"))
        legend_above(axes)

    return draw_svg(draw, name=name, label=label, grid="x", height_in=0.9 + 0.6 * len(rows))


def axis_unit(largest: int) -> tuple[int, str]:
    """Bytes and name of the largest unit (GiB, MiB, KiB, else bytes) that is at most ``largest`` bytes."""
    return next(
        (unit for unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if largest >= unit[0]), (1, "bytes")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points over the steps, in the colour of ``series``."""

    name: str
    points: Points
    series: str
    width: float = 1.6
    alpha: float = 1
    marker: str = ""
    style: object = "-"


DASHED = (0, (5, 1.6))


def line_picture(
    lines: Sequence[Curve],
    *,
    name: str,
    label: str,
    finish: Callable[[Axes], object],
    level: tuple[str, float, str] | None = None,
    height_in: float = 2.7,
    text: Callable[[float], str] = format_number,
) -> str:
    """SVG of lines, thinned, a single point as a dot; values that no axis can show are crosses at the upper edge.

    ``level``: name, value and series of a dashed line that holds for every step. ``finish`` sets the axis; ``text``
    writes a value.
    """
    broken = [step for line in lines for step, value in line.points if not math.isfinite(value)]

    def draw(axes: Axes) -> None:
        """Draws the lines in their order, then what is special."""
        for line in lines:
            finite = thin([point for point in line.points if math.isfinite(point[1])])
            axes.plot(
                [x for x, _ in finite], [y for _, y in finite], color=colour(line.series), label=line.name,
                linewidth=line.width, alpha=line.alpha, linestyle=line.style, markersize=3.5,
                marker=line.marker or ("o" if len(finite) == 1 else ""),
            )  # fmt: skip
        if broken:
            axes.plot(
                broken, [1.0] * len(broken), "x", color=colour("series-6"), transform=axes.get_xaxis_transform(),
                clip_on=False, markersize=6, label="not finite",
            )  # fmt: skip
        if level is not None:
            what, value, series = level
            axes.axhline(value, color=colour(series), linewidth=1.4, linestyle=DASHED, label=what)
        finish(axes)
        legend_above(axes)

    curves = {line.name: line.points for line in lines}
    return draw_svg(draw, name=name, label=label, height_in=height_in, curves=curves, text=text)


def loss_picture(lines: Sequence[Curve], **how: Any) -> str:
    """``line_picture`` of losses, on a logarithmic axis where the largest is over MANY_TIMES the smallest."""
    losses = [value for line in lines for _, value in line.points if math.isfinite(value)]

    def finish(axes: Axes) -> None:
        """Names the unit, and divides the axis."""
        axes.set_ylabel("nats per token")
        if losses and 0 < MANY_TIMES * min(losses) < max(losses):
            from matplotlib.ticker import LogLocator

            axes.set_yscale("log", subs=[])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    return line_picture(lines, finish=finish, **how)


MANY_TIMES = 3
"""Losses that differ by more than this are drawn on a logarithmic axis: else the end of every curve is one line."""


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
