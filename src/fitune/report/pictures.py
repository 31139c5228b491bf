"""All pictures of one report."""

from dataclasses import dataclass

from fitune.report import plots
from fitune.report.compare import measure
from fitune.report.pieces import Html
from fitune.report.run_files import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """SVG elements; empty where there is nothing to show."""

    memory: Html
    loss: Html
    learning_rate: Html
    throughput: Html
    grad_norm: Html


def draw_pictures(run: RunFiles) -> Pictures:
    """Raises MissingExtra without matplotlib."""
    phases = measure(run.run, run.steps).phases
    predicted = run.estimate.tokens_per_second if run.estimate else None
    return Pictures(
        memory=Html(plots.memory_bars(run.estimate, phases) if run.estimate or phases else ""),
        loss=Html(plots.loss_curve(run.steps) if run.steps else ""),
        learning_rate=Html(plots.learning_rate_curve(run.steps) if run.steps else ""),
        throughput=Html(plots.throughput_curve(run.steps, predicted=predicted) if run.steps else ""),
        grad_norm=Html(
            plots.grad_norm_curve(run.steps, clipped_at=run.plan.schedule.max_grad_norm) if run.steps else ""
        ),
    )
