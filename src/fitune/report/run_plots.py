"""The pictures of one run: memory by phase; loss, learning rate, speed and norm of gradients over the steps."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from fitune.report.compare import PHASE_NAMES
from fitune.report.plots import (
    SERIES,
    Axes,
    Points,
    axis_unit,
    bars_to_the_right,
    colour,
    draw_bar,
    draw_bar_label,
    draw_line,
    draw_svg,
    legend_above,
    logarithmic_if_wide,
    mark_not_finite,
)
from fitune.spec.predictions import Estimate, Phase
from fitune.spec.reports import StepReport
from fitune.units import format_bytes, format_learning_rate, format_rate


def memory_bars(estimate: Estimate | None, measured: dict[Phase, int]) -> str:
    """Per phase the predicted bytes stacked by term, and below them the measured ones in one piece."""
    predicted = {} if estimate is None else fold_small_terms(estimate.memory.phases)
    phases = [phase for phase in PHASE_NAMES if phase in predicted or phase in measured]
    largest = max([*(sum(predicted[p].values()) for p in predicted), *measured.values()], default=0) or 1
    unit, unit_name = axis_unit(largest)

    names = list(dict.fromkeys(name for terms in predicted.values() for name in terms))
    colours = {name: colour(f"series-{number}") for number, name in enumerate(names, start=1)}

    def draw(axes: Axes) -> None:
        """Draws for each phase one stacked bar of predicted terms and one measured bar."""
        for place, phase in enumerate(phases):
            start, terms = 0.0, predicted.get(phase, {})
            for name, value in terms.items():
                words = name.replace("_", " ")
                tip = f"{PHASE_NAMES[phase]}: {words} {format_bytes(value)}, predicted"
                draw_bar(axes, place - 0.19, start, value / unit, colours[name], words, tip=tip)
                start += value / unit
            if terms:
                whole = sum(terms.values())
                draw_bar_label(axes, place - 0.19, whole / unit, format_bytes(whole))
            if phase in measured:
                length = measured[phase] / unit
                tip = f"{PHASE_NAMES[phase]}: {format_bytes(measured[phase])}, measured"
                draw_bar(axes, place + 0.19, 0, length, colour("ink"), "measured", tip=tip)
                draw_bar_label(axes, place + 0.19, length, format_bytes(measured[phase]))
        names = [PHASE_NAMES[phase] for phase in phases]
        bars_to_the_right(axes, names, most=largest / unit * 1.22, axis=unit_name)

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
    name, mean = ("each step", running_mean(train)) if len(train) >= 30 else ("training", [])

    def draw(axes: Axes) -> None:
        """Draws the training loss with its running mean from 30 steps on, and the held-out loss."""
        if mean:
            draw_line(axes, train, "series-1", name, width=0.7, alpha=0.4)
            draw_line(axes, mean, "series-1", "training, running mean", width=1.8)
        else:
            draw_line(axes, train, "series-1", name, width=1.6)
        if held_out:
            draw_line(axes, held_out, "series-6", "held out", width=1.4, marker="o")
        mark_not_finite(axes, [*train, *held_out])
        axes.set_ylabel("nats per token")
        logarithmic_if_wide(axes, [loss for _, loss in [*train, *held_out]])
        legend_above(axes)

    curves = {name: train, "running mean": mean, "held out": held_out}
    return draw_svg(draw, name="loss", label="Loss over the steps", curves=curves)


def learning_rate_curve(steps: Sequence[StepReport]) -> str:
    """SVG of the learning rate over the steps, on an axis from 0, its numbers as powers of ten."""
    return _curve(
        [(step.step, step.learning_rate) for step in steps], "learning rate", "series-3", name="learning-rate",
        label="Learning rate over the steps", text=format_learning_rate, width=1.6,
        finish=lambda axes: axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True),
    )  # fmt: skip


def throughput_curve(steps: Sequence[StepReport], *, predicted: float | None) -> str:
    """Tokens per second of each step; the prediction as a dashed line."""

    def finish(axes: Axes) -> None:
        """Names the unit and writes whole numbers."""
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return _curve(
        [(step.step, step.tokens_per_second) for step in steps], "measured", "series-1", name="throughput",
        label="Throughput over the steps", text=format_rate, finish=finish,
        level=predicted, level_style=("predicted", "series-2", 1.6),
    )  # fmt: skip


def grad_norm_curve(steps: Sequence[StepReport], *, clipped_at: float) -> str:
    """Norm of the gradient before clipping, and a dashed line at the norm at which it is clipped; 0 for ``clipped_at``
    means no clipping."""
    points = [(step.step, step.grad_norm) for step in steps]
    return _curve(
        points, "before clipping", "series-4", name="grad-norm", label="Gradient norm over the steps",
        finish=lambda axes: mark_not_finite(axes, points),
        level=clipped_at or None, level_style=("clipped at", "muted", 1.2),
    )  # fmt: skip


def _curve(
    points: Points, what: str, series: str, *, width: float = 1.2, level: float | None = None,
    level_style: tuple[str, str, float] = ("", "ink", 0), finish: Callable[[Axes], object], **shown: Any,
) -> str:  # fmt: skip
    """One curve on an axis from 0, and a dashed line at ``level`` with its name, colour and width."""

    def draw(axes: Axes) -> None:
        """Draws both, then what is special."""
        draw_line(axes, points, series, what, width=width)
        if level is not None:
            name, line, thick = level_style
            axes.axhline(level, color=colour(line), linewidth=thick, linestyle=(0, (4, 2)), label=name)
        finish(axes)
        axes.set_ylim(bottom=0)
        legend_above(axes)

    return draw_svg(draw, curves={what: points}, **shown)


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
