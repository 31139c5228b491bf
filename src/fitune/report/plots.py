"""The pictures of a report: memory bars and curves over the steps, as inline SVG by matplotlib (extra ``plots``).

Colours are CSS variables of the page (``--ink``, ``--series-1`` …), so one picture reads in light and in dark mode.
matplotlib knows no variables: it draws with stand-in colours that are replaced afterwards. Text stays text, in the
page's font.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from fitune.errors import MissingExtra
from fitune.report.compare import PHASE_NAMES
from fitune.spec.predictions import Estimate, Phase
from fitune.spec.reports import StepReport
from fitune.units import GIB, KIB, MIB, format_bytes

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


_POINTS = 600
"""More points than a picture has pixels only make the file larger."""


def memory_bars(estimate: Estimate | None, measured: dict[Phase, int]) -> str:
    """Per phase the predicted bytes stacked by term, and below them the measured ones in one piece."""
    predicted = {} if estimate is None else fold_small_terms(estimate.memory.phases)
    phases = [phase for phase in PHASE_NAMES if phase in predicted or phase in measured]
    largest = max([*(sum(predicted[p].values()) for p in predicted), *measured.values()], default=0) or 1
    unit, unit_name = axis_unit(largest)

    def draw(axes: Axes) -> None:
        for place, phase in enumerate(phases):
            _stacked_bar(axes, place - 0.19, predicted.get(phase, {}), _term_colours(predicted), unit)
            if phase in measured:
                draw_bar(axes, place + 0.19, 0, measured[phase] / unit, colour("ink"), "measured")
                draw_bar_label(axes, place + 0.19, measured[phase], unit)
        axes.set_yticks(range(len(phases)), [PHASE_NAMES[phase] for phase in phases])
        axes.set_xlim(0, largest / unit * 1.22)  # room for the labels at the ends of the bars
        axes.set_xlabel(unit_name)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelcolor=colour("ink"))
        legend_above(axes)

    return draw_svg(
        draw,
        name="memory",
        label="Memory by phase, predicted and measured",
        grid="x",
        height_in=0.9 + 0.76 * len(phases),
    )


def loss_curve(steps: Sequence[StepReport]) -> str:
    """Training loss, its running mean, and the loss on the held-out rows."""
    train = [(step.step, step.loss) for step in steps]
    held_out = [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]

    def draw(axes: Axes) -> None:
        if len(train) >= 30:
            draw_line(axes, train, "series-1", "each step", width=0.7, alpha=0.4)
            draw_line(axes, running_mean(train), "series-1", "training, running mean", width=1.8)
        else:
            draw_line(axes, train, "series-1", "training", width=1.6)
        if held_out:
            draw_line(axes, held_out, "series-6", "held out", width=1.4, marker="o")
        _mark_not_finite(axes, [*train, *held_out])
        axes.set_ylabel("nats per token")
        legend_above(axes)

    return draw_svg(draw, name="loss", label="Loss over the steps")


def learning_rate_curve(steps: Sequence[StepReport]) -> str:
    points = [(step.step, step.learning_rate) for step in steps]

    def draw(axes: Axes) -> None:
        draw_line(axes, points, "series-3", "learning rate", width=1.6)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)

    return draw_svg(draw, name="learning-rate", label="Learning rate over the steps")


def throughput_curve(steps: Sequence[StepReport], *, predicted: float | None = None) -> str:
    """Tokens per second of each step; the prediction as a dashed line."""
    points = [(step.step, step.tokens_per_second) for step in steps]

    def draw(axes: Axes) -> None:
        draw_line(axes, points, "series-1", "measured", width=1.2)
        if predicted is not None:
            axes.axhline(
                predicted, color=colour("series-2"), linewidth=1.6, linestyle=(0, (4, 2)), label="predicted"
            )
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        legend_above(axes)

    return draw_svg(draw, name="throughput", label="Throughput over the steps")


def grad_norm_curve(steps: Sequence[StepReport], *, clipped_at: float) -> str:
    """Norm of the gradient before clipping; 0 for ``clipped_at`` means no clipping."""
    points = [(step.step, step.grad_norm) for step in steps]

    def draw(axes: Axes) -> None:
        draw_line(axes, points, "series-4", "before clipping", width=1.2)
        if clipped_at:
            axes.axhline(
                clipped_at, color=colour("muted"), linewidth=1.2, linestyle=(0, (4, 2)), label="clipped at"
            )
        _mark_not_finite(axes, points)
        axes.set_ylim(bottom=0)
        legend_above(axes)

    return draw_svg(draw, name="grad-norm", label="Gradient norm over the steps")


def fold_small_terms(phases: dict[Phase, dict[str, int]]) -> dict[Phase, dict[str, int]]:
    """Phases with at most as many terms as there are colours: the smallest are added up as ``other``."""
    largest: dict[str, int] = {}
    for terms in phases.values():
        for name, value in terms.items():
            largest[name] = max(value, largest.get(name, 0))
    if len(largest) <= SERIES:
        return phases
    kept = sorted(largest, key=lambda name: largest[name], reverse=True)[: SERIES - 1]
    return {
        phase: {name: terms[name] for name in largest if name in kept and name in terms}
        | {"other": sum(value for name, value in terms.items() if name not in kept)}
        for phase, terms in phases.items()
    }


def running_mean(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Mean of the finite values around each step, a twentieth of them at a time; centred, so it does not lag."""
    finite = [point for point in points if math.isfinite(point[1])]
    sums = [0.0, *accumulate(value for _, value in finite)]
    reach = max(len(finite) // 40, 2)
    smooth = []
    for place, (step, _) in enumerate(finite):
        around = min(reach, place, len(finite) - 1 - place)  # symmetric up to the ends
        total = sums[place + around + 1] - sums[place - around]
        smooth.append((step, total / (2 * around + 1)))
    return smooth


def thin(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
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


def _stacked_bar(axes: Axes, place: float, terms: dict[str, int], colours: dict[str, str], unit: int) -> None:
    start = 0.0
    for name, value in terms.items():
        draw_bar(axes, place, start, value / unit, colours[name], name.replace("_", " "))
        start += value / unit
    if terms:
        draw_bar_label(axes, place, sum(terms.values()), unit)


def draw_bar(axes: Axes, place: float, start: float, length: float, fill: str, label: str) -> None:
    axes.barh(
        place,
        length,
        left=start,
        height=0.34,
        color=fill,
        label=label,
        edgecolor=colour("surface"),
        linewidth=0.6,
    )


def draw_bar_label(axes: Axes, place: float, value: int, unit: int) -> None:
    axes.annotate(
        format_bytes(value), (value / unit, place), xytext=(4, 0), textcoords="offset points", va="center",
        color=colour("ink"), fontsize=8.5,
    )  # fmt: skip


def _term_colours(phases: dict[Phase, dict[str, int]]) -> dict[str, str]:
    names = list(dict.fromkeys(name for terms in phases.values() for name in terms))
    return {name: colour(f"series-{number}") for number, name in enumerate(names, start=1)}


def axis_unit(largest: int) -> tuple[int, str]:
    return next(
        (unit for unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if largest >= unit[0]), (1, "bytes")
    )


def draw_line(
    axes: Axes,
    points: Sequence[tuple[int, float]],
    series: str,
    label: str,
    *,
    width: float,
    alpha: float = 1,
    marker: str = "",
    style: object = "-",
) -> None:
    finite = thin([point for point in points if math.isfinite(point[1])])
    marker = marker or ("o" if len(finite) == 1 else "")
    axes.plot(
        [x for x, _ in finite], [y for _, y in finite], color=colour(series), label=label, linewidth=width,
        alpha=alpha, marker=marker, markersize=3.5, linestyle=style,
    )  # fmt: skip


def _mark_not_finite(axes: Axes, points: Sequence[tuple[int, float]]) -> None:
    """A cross at the upper edge for every value that no axis can show."""
    steps = [step for step, value in points if not math.isfinite(value)]
    if steps:
        axes.plot(
            steps, [1.0] * len(steps), "x", color=colour("series-6"), transform=axes.get_xaxis_transform(),
            clip_on=False, markersize=6, label="not finite",
        )  # fmt: skip


def legend_above(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(sorted(zip(labels, handles, strict=True), key=lambda entry: entry[0] == "measured"))
    if len(unique) > 1:
        axes.figure.legend(
            unique.values(), unique.keys(), loc="outside upper left", ncols=min(len(unique), 3),
            frameon=False, fontsize=9, labelcolor=colour("ink"), handlelength=1.2, columnspacing=1.4,
            borderaxespad=0.2,
        )  # fmt: skip
