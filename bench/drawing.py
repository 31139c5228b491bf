"""A picture that stands alone: SVG written by hand, light or dark as the reader has it, no library.

Colours are classes, the text is the reader's sans-serif; sizes are pixels at 100 %.
"""

from collections.abc import Iterable
from html import escape

_LIGHT = {
    "surface": "#ffffff", "panel": "#f3f5f7", "ink": "#1d2126", "muted": "#5c646d", "line": "#cfd5da",
    "good": "#00704f", "bad": "#b23c00",
    "series-1": "#0072b2", "series-2": "#e69f00", "series-3": "#009e73", "series-4": "#cc79a7",
    "series-5": "#56b4e9", "series-6": "#d55e00", "series-7": "#e0d12f", "series-8": "#9aa1a9",
}  # fmt: skip
_DARK = {
    "surface": "#1c1f24", "panel": "#272b31", "ink": "#e7eaed", "muted": "#9ba4ae", "line": "#434b54",
    "good": "#45c79b", "bad": "#f48a55",
    "series-1": "#4ba3dc", "series-2": "#efb035", "series-3": "#2bb98b", "series-4": "#dc96bd",
    "series-5": "#93d2f6", "series-6": "#ef7f3b", "series-7": "#f3e76a", "series-8": "#868e97",
}  # fmt: skip
"""Okabe and Ito's set, as on the page of a run: told apart with every kind of colour vision."""

SERIES = 8


def document(elements: Iterable[str], *, width: float, height: float, label: str) -> str:
    """The whole file. ``label`` is what is read aloud in place of the picture."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="{escape(label)}">',
            f"<style>{_style()}</style>",
            rectangle(0, 0, width, height, fill="surface"),
            *elements,
            "</svg>\n",
        ]
    )


def _style() -> str:
    text = "text{font:12px system-ui,'Segoe UI',Roboto,'Noto Sans','Liberation Sans',sans-serif}"
    weights = ".bold{font-weight:600}.small{font-size:11px}.large{font-size:16px;font-weight:600}"
    ends = ".middle{text-anchor:middle}.end{text-anchor:end}"
    return f"{text}{weights}{ends}{_colours(_LIGHT)}@media (prefers-color-scheme:dark){{{_colours(_DARK)}}}"


def _colours(colours: dict[str, str]) -> str:
    return "".join(
        f".fill-{name}{{fill:{value}}}.stroke-{name}{{stroke:{value}}}" for name, value in colours.items()
    )


def rectangle(
    x: float, y: float, width: float, height: float, *, fill: str = "", stroke: str = "", radius: float = 0
) -> str:
    """Without ``fill`` only its edge."""
    corner = f' rx="{radius:g}"' if radius else ""
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"{corner} '
        f"{_paint(fill=fill, stroke=stroke)}/>"
    )


def text(x: float, y: float, words: str, *, fill: str = "ink", style: str = "") -> str:
    """``style``: any of bold, small, large, middle, end. ``y`` is the line on which the letters stand."""
    return f'<text x="{x:.5g}" y="{y:.5g}" class="{f"fill-{fill} {style}".strip()}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = "line", dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}"{dashes} {_paint(stroke=stroke)}/>'


def circle(x: float, y: float, radius: float, *, fill: str = "", stroke: str = "") -> str:
    return f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:.5g}" {_paint(fill=fill, stroke=stroke)}/>'


def polygon(points: Iterable[tuple[float, float]], *, fill: str) -> str:
    corners = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
    return f'<polygon points="{corners}" {_paint(fill=fill)}/>'


def _paint(*, fill: str = "", stroke: str = "") -> str:
    classes = [f"fill-{fill}"] if fill else []
    classes += [f"stroke-{stroke}"] if stroke else []
    hollow = "" if fill else ' fill="none"'
    return f'class="{" ".join(classes)}"{hollow}'
