"""A drawing surface: matplotlib axes in, an SVG element for the page out.

Colours are CSS variables of the page (``--ink``, ``--series-1`` …), so one picture reads in light and in
dark mode. matplotlib knows no variables: it draws with stand-in colours that are replaced afterwards.
Text stays text, in the page's font.
"""

import io
import re
from collections.abc import Callable
from typing import Any

from fitune.errors import MissingExtra

SERIES = 8
"""Colours for the terms of the memory bars: Okabe and Ito's set, then grey."""
_STAND_INS = {
    name: f"#0000{number:02x}" for number, name in enumerate(("ink", "muted", "line", "surface"), start=1)
} | {f"series-{number}": f"#0001{number:02x}" for number in range(1, SERIES + 1)}
_WIDTH_IN = 4.9

Axes = Any  # matplotlib is optional and untyped here


def colour(name: str) -> str:
    """The stand-in for a variable of the page."""
    return _STAND_INS[name]


def draw_svg(
    draw: Callable[[Axes], None], *, name: str, label: str, grid: str = "y", height_in: float = 2.7
) -> str:
    """Call ``draw`` with empty axes; ``grid`` is the axis of the values: ``y`` over steps, ``x`` for bars.

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
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        axes = figure.add_subplot()
        _quiet(axes, grid)
        if grid == "y":
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(buffer.getvalue(), label)


def _quiet(axes: Axes, grid: str) -> None:
    """Light grid lines across the values, no frame."""
    for side, spine in axes.spines.items():
        spine.set_visible(side == ("bottom" if grid == "y" else "left"))
        spine.set_color(colour("line"))
    axes.grid(axis=grid, color=colour("line"), linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=colour("muted"))


def _inline(svg: str, label: str) -> str:
    """Only the element, as wide as its place, with variables for colours and without ids nobody refers to."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s(?:xmlns(?::xlink)?|version)=\"[^\"]*\"|font-family: [^;]*; ", "", svg).replace(
        "xlink:href", "href"
    )
    size = r'(<svg[^>]*?)\s(?:width|height)="[^"]*"'
    svg = re.sub(size, r"\1", re.sub(size, r"\1", svg, count=1), count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda match: match.group(0) if match.group(1) in used else "", svg)
    for name, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg
