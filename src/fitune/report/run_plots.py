"""The pictures of one run: memory by phase; loss, learning rate, speed and norm of gradients over the steps."""

import math
from collections.abc import Sequence
from itertools import accumulate

from fitune.report.compare import PHASE_NAMES
from fitune.report.plots import SERIES, Axes, Curve, line_picture, loss_picture, paired_bars
from fitune.units import format_learning_rate, format_rate
from fitune.values.predictions import Estimate, Phase
from fitune.values.reports import StepReport


def memory_bars(estimate: Estimate | None, measured: dict[Phase, int]) -> str:
    """Per phase the predicted bytes stacked by term, and below them the measured ones in one piece."""
    predicted = {} if estimate is None else fold_small_terms(estimate.memory.phases)
    rows = {
        name: (
            {term.replace("_", " "): size for term, size in predicted.get(phase, {}).items()},
            measured.get(phase),
        )
        for phase, name in PHASE_NAMES.items()
        if phase in predicted or phase in measured
    }
    return paired_bars(rows, unit="bytes", name="memory", label="Memory by phase, predicted and measured")


def loss_curve(steps: Sequence[StepReport]) -> str:
    """SVG of the training loss, from 30 steps on with its running mean, and of the loss on the held-out rows."""
    train = [(step.step, step.loss) for step in steps]
    held_out = [(step.step, step.eval_loss) for step in steps if step.eval_loss is not None]
    lines = [Curve(name="training", points=train, series="series-1")]
    if len(train) >= 30:
        lines = [
            Curve(name="each step", points=train, series="series-1", width=0.7, alpha=0.4),
            Curve(name="running mean", points=running_mean(train), series="series-1", width=1.8),
        ]
    if held_out:
        lines.append(Curve(name="held out", points=held_out, series="series-6", width=1.4, marker="o"))
    return loss_picture(lines, name="loss", label="Loss over the steps")


def learning_rate_curve(steps: Sequence[StepReport]) -> str:
    """SVG of the learning rate over the steps, on an axis from 0, its numbers as powers of ten."""

    def finish(axes: Axes) -> None:
        """Writes powers of ten."""
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
        axes.set_ylim(bottom=0)

    points = [(step.step, step.learning_rate) for step in steps]
    return line_picture(
        [Curve(name="learning rate", points=points, series="series-3")], finish=finish, name="learning-rate",
        label="Learning rate over the steps", text=format_learning_rate,
    )  # fmt: skip


def throughput_curve(steps: Sequence[StepReport], *, predicted: float | None) -> str:
    """SVG of the tokens per second of each step, on an axis from 0; the prediction as a dashed line."""

    def finish(axes: Axes) -> None:
        """Names the unit and writes whole numbers."""
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylim(bottom=0)

    points = [(step.step, step.tokens_per_second) for step in steps]
    return line_picture(
        [Curve(name="measured", points=points, series="series-1", width=1.2)], finish=finish, name="throughput",
        label="Throughput over the steps", text=format_rate,
        level=None if predicted is None else ("predicted", predicted, "series-2"),
    )  # fmt: skip


def grad_norm_curve(steps: Sequence[StepReport], *, clipped_at: float) -> str:
    """SVG of the gradient's norm before clipping, on an axis from 0, and a dashed line at the norm at which it is
    clipped; 0 for ``clipped_at`` means no clipping."""
    points = [(step.step, step.grad_norm) for step in steps]
    return line_picture(
        [Curve(name="before clipping", points=points, series="series-4", width=1.2)],
        finish=lambda axes: axes.set_ylim(bottom=0), name="grad-norm", label="Gradient norm over the steps",
        level=("clipped at", clipped_at, "muted") if clipped_at else None,
    )  # fmt: skip


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
