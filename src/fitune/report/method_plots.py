"""Pictures of several runs in one: losses over each other, peaks and speeds below each other."""

import math
from collections.abc import Callable, Mapping, Sequence

from fitune.report.compare import Row
from fitune.report.plots import (
    SERIES,
    Axes,
    axis_unit,
    colour,
    draw_bar,
    draw_line,
    draw_svg,
    legend_above,
    running_mean,
)
from fitune.spec.plan import Plan, trains_every_weight
from fitune.spec.reports import StepReport
from fitune.units import format_bytes, format_rate

Points = Sequence[tuple[int, float]]
_SOLID, _DASHED = "-", (0, (5, 1.6))
_MANY_TIMES = 8
"""Losses that differ by more than this are drawn on a logarithmic axis: else the end of every curve is one line."""


def loss_curves(runs: Mapping[str, Sequence[StepReport]], plans: Mapping[str, Plan]) -> str:
    """Running means: single steps of several runs would hide one another."""
    curves = {name: running_mean([(step.step, step.loss) for step in steps]) for name, steps in runs.items()}
    return _curves(curves, plans, name="losses", label="Training loss of every method")


def held_out_curves(runs: Mapping[str, Sequence[StepReport]], plans: Mapping[str, Plan]) -> str:
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
        for place, row in enumerate(rows.values()):
            sides = (("predicted", row.predicted, -0.19, "series-1"), ("measured", row.measured, 0.19, "ink"))
            for side, value, offset, fill in sides:
                if value:
                    draw_bar(axes, place + offset, 0, value / unit, colour(fill), side)
                    _label(axes, place + offset, value / unit, text(value))
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_xlim(0, (_largest(rows) or 1) / unit * 1.3)  # room for the labels at the ends of the bars
        axes.set_xlabel(axis)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelcolor=colour("ink"))
        legend_above(axes)

    return draw_svg(draw, name=name, label=label, grid="x", height_in=0.9 + 0.5 * len(rows))


def _label(axes: Axes, place: float, length: float, text: str) -> None:
    axes.annotate(
        text, (length, place), xytext=(4, 0), textcoords="offset points", va="center", color=colour("ink"),
        fontsize=8.5,
    )  # fmt: skip


def _largest(rows: Mapping[str, Row]) -> float:
    return max(
        (value for row in rows.values() for value in (row.predicted, row.measured) if value), default=1
    )


def _curves(curves: Mapping[str, Points], plans: Mapping[str, Plan], *, name: str, label: str) -> str:
    """Solid where every weight is trained, dashed where adapters are."""
    finite = {method: [p for p in points if math.isfinite(p[1])] for method, points in curves.items()}
    losses = [loss for points in finite.values() for _, loss in points]

    def draw(axes: Axes) -> None:
        for place, (method, points) in enumerate(finite.items()):
            style = _SOLID if trains_every_weight(plans[method].tuning) else _DASHED
            marker = "o" if len(points) < 30 else ""
            series = f"series-{1 + place % SERIES}"
            draw_line(axes, points, series, method, width=1.6, marker=marker, style=style)
        if losses and min(losses) > 0 and max(losses) > _MANY_TIMES * min(losses):
            _logarithmic(axes)
        axes.set_ylabel("nats per token")
        legend_above(axes)

    return draw_svg(draw, name=name, label=label, height_in=3.4)


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log", subs=[])
    axes.yaxis.set_major_locator(_one_two_five())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _one_two_five() -> object:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5), numticks=12)
