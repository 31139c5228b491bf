"""HTML of the local pages: the planner with its bars and tables, and the runs of a folder. All texts are escaped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fitune.report.page import render
from fitune.report.plots import thin
from fitune.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a bar, in thousandths of its length."""

    name: str
    colour: int
    start: float
    width: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of a picture."""

    name: str
    value: str
    over: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bars on one scale, and the place of the limit on it in thousandths."""

    bars: tuple[Bar, ...]
    limit: float
    limit_text: str

    @property
    def legend(self) -> dict[str, int]:
        """Colours by the names of parts."""
        parts = [part for bar in self.bars for part in bar.parts]
        return {part.name: part.colour for part in sorted(parts, key=lambda part: part.colour)}


def bars_of(rows: Mapping[str, Mapping[str, int]], *, limit: int) -> Bars:
    """Rows of bytes by name, against ``limit`` bytes, which is what a device has for them."""
    most = max(limit, *(sum(sizes.values()) for sizes in rows.values())) * 1.04
    bars = []
    for row, sizes in rows.items():
        start, parts, total = 0.0, [], sum(sizes.values())
        for number, (name, size) in enumerate(sizes.items(), 1):
            width = 1000 * size / most
            tip = f"{row}: {name} {format_bytes(size)} of {format_bytes(total)}"
            if width >= 0.5:
                parts.append(Part(name=name, colour=number, start=start, width=width, tip=tip))
            start += width
        bars.append(Bar(name=row, value=format_bytes(total), over=total > limit, parts=tuple(parts)))
    return Bars(bars=tuple(bars), limit=1000 * limit / most, limit_text=format_bytes(limit))


def planner_html(
    question: Mapping[str, str],
    choices: Mapping[str, Sequence[str]],
    *,
    answer: str,
    ways: str,
    live: bool,
    cards: Sequence[str] = (),
    runs: bool = False,
) -> str:
    """The whole page. ``answer`` and ``ways`` are HTML; a page that is not ``live`` is a file without a form.

    ``cards``: names of those that can be rented; ``runs``: whether there is a page of runs beside this one.
    """
    from markupsafe import Markup

    return render(
        "planner.html", title="fitune: what fits", question=question, choices=choices, answer=Markup(answer),
        ways=Markup(ways), live=live, cards=cards, runs=runs, scripts=("hover.js", "planner.js"),
    )  # fmt: skip


def answer_html(**values: Any) -> str:
    """The verdict, the pictures, the recipe and the command, or the error."""
    shown = {"error": None, "nothing": None, "facts": (), **values}
    return render("planner_answer.html", **shown)


def ways_html(**values: Any) -> str:
    """The table of ways that fit, and the first screen of the terminal."""
    return render("planner_ways.html", **values)


def rent_html(**values: Any) -> str:
    """Rows of the table of cards to rent."""
    return render("planner_rent.html", **values)


def clusters_html(**values: Any) -> str:
    """The table of one's own clusters, or the error of the fleet file that was pasted."""
    return render("planner_clusters.html", **{"error": None, **values})


def runs_html(folder: str, *, table: str) -> str:
    """The page of a folder's runs, which asks for ``table`` again while it is seen."""
    from markupsafe import Markup

    return render(
        "runs.html",
        title=f"fitune: runs in {folder}",
        folder=folder,
        table=Markup(table),
        scripts=("runs.js",),
    )


def runs_table_html(**values: Any) -> str:
    """A row for each run."""
    return render("runs_table.html", **values)


def run_refused_html(why: str) -> str:
    """The page in place of a run's report."""
    return render("run_refused.html", title="fitune: no report", why=why)


def curve_of(points: Sequence[tuple[int, float]]) -> str:
    """Points of an SVG polyline in a box of 100 × 30, the highest value at its top; empty for fewer than two values.
    Values that are not finite are left out."""
    finite = thin([(step, value) for step, value in points if math.isfinite(value)])
    if len(finite) < 2:
        return ""
    first, last = finite[0][0], finite[-1][0]
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    return " ".join(
        f"{100 * (step - first) / (last - first or 1):.1f},{29 - 28 * (value - low) / (high - low or 1):.1f}"
        for step, value in finite
    )
