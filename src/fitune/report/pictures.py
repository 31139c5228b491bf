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
    memory = plots.memory_bars(run.estimate, phases) if run.estimate or phases else ""
    if not run.steps:
        return Pictures(
            memory=Html(memory), loss=Html(), learning_rate=Html(), throughput=Html(), grad_norm=Html()
        )
    predicted = run.estimate.tokens_per_second if run.estimate else None
    clipped_at = run.plan.schedule.max_grad_norm
    return Pictures(
        memory=Html(memory),
        loss=Html(plots.loss_curve(run.steps)),
        learning_rate=Html(plots.learning_rate_curve(run.steps)),
        throughput=Html(plots.throughput_curve(run.steps, predicted=predicted)),
        grad_norm=Html(plots.grad_norm_curve(run.steps, clipped_at=clipped_at)),
    )
