"""Pictures of several runs in one: losses over each other, peaks below each other."""

import math
from collections.abc import Mapping, Sequence

from fitune.report.compare import Row
from fitune.report.plots import axis_unit, draw_bar, draw_bar_label, draw_line, legend_above, running_mean
from fitune.report.svg import SERIES, Axes, colour, draw_svg
from fitune.spec.reports import StepReport

Runs = Mapping[str, Sequence[StepReport]]


def loss_curves(runs: Runs) -> str:
    """Running means: single steps of several runs would hide one another."""
    curves = {name: running_mean([(step.step, step.loss) for step in steps]) for name, steps in runs.items()}
    return _curves(curves, name="losses", label="Training loss of every method")


def held_out_curves(runs: Runs) -> str:
    curves = {
        name: [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]
        for name, steps in runs.items()
    }
    return _curves(curves, name="held-out", label="Loss on the held-out rows of every method")


def peak_bars(peaks: Mapping[str, Row]) -> str:
    """Predicted and measured peak of every method."""
    values = [value for row in peaks.values() for value in (row.predicted, row.measured) if value]
    largest = int(max(values, default=1))
    unit, unit_name = axis_unit(largest)

    def draw(axes: Axes) -> None:
        for place, row in enumerate(peaks.values()):
            sides = (("predicted", row.predicted, -0.19, "series-1"), ("measured", row.measured, 0.19, "ink"))
            for label, value, offset, fill in sides:
                if value:
                    draw_bar(axes, place + offset, 0, value / unit, colour(fill), label)
                    draw_bar_label(axes, place + offset, int(value), unit)
        axes.set_yticks(range(len(peaks)), list(peaks))
        axes.set_xlim(0, largest / unit * 1.22)  # room for the labels at the ends of the bars
        axes.set_xlabel(unit_name)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelcolor=colour("ink"))
        legend_above(axes)

    return draw_svg(
        draw,
        name="peaks",
        label="Peak of tensors of every method",
        grid="x",
        height_in=0.9 + 0.6 * len(peaks),
    )


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]], *, name: str, label: str) -> str:
    def draw(axes: Axes) -> None:
        for place, (method, points) in enumerate(curves.items()):
            finite = [point for point in points if math.isfinite(point[1])]
            marker = "o" if len(finite) < 30 else ""
            draw_line(axes, finite, f"series-{1 + place % SERIES}", method, width=1.6, marker=marker)
        axes.set_ylabel("nats per token")
        legend_above(axes)

    return draw_svg(draw, name=name, label=label)
