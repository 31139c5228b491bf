"""The top of the page: what was done, how it ended, the verdict, and the figures people ask for first."""

from fitune.report import plan_words
from fitune.report.compare import Measured
from fitune.report.pieces import Html, element
from fitune.report.run_files import RunFiles
from fitune.spec.reports import RunReport
from fitune.units import (
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
)


def header(run: RunFiles, measured: Measured) -> Html:
    status = run.run.status if run.run else "unfinished"
    badge = element("span", status, class_=f"badge {status}")
    reason = run.run.reason if run.run else _without_report(run)
    return element(
        "header",
        element("p", "fitune run report", badge, class_="eyebrow"),
        element("h1", run.plan.model.name),
        element("p", plan_words.headline(run.plan), class_="subtitle"),
        element("p", verdict(run, measured), class_="verdict"),
        element("p", reason, class_="reason") if reason else None,
        element("dl", *_tiles(run, measured), class_="tiles"),
    )


def verdict(run: RunFiles, measured: Measured) -> str:
    """The one sentence the page is about."""
    predicted = None if run.estimate is None else run.estimate.memory.tensor_peak_bytes
    peak = measured.peak_bytes
    if predicted is None and not peak:
        return "Memory was neither predicted nor measured."
    if predicted is None:
        return f"Measured {format_bytes(peak or 0)} at the peak; there was no prediction."
    if not peak:
        return f"Predicted {format_bytes(predicted)} at the peak; nothing was measured."
    error = format_percent(predicted / peak - 1, signed=True)
    return f"Predicted {format_bytes(predicted)}, measured {format_bytes(peak)} ({error}){_where(run)}"


def _where(run: RunFiles) -> str:
    """At which step the peak was expected, and what the plan was fitted by; empty when the data was not known."""
    prediction = run.prediction
    if prediction is None or not prediction.heaviest_step:
        return ""
    return (
        f", expected in step {prediction.heaviest_step:,} with {prediction.heaviest_tokens:,} tokens in a "
        f"micro-batch; the plan allows {format_bytes(prediction.allowed_bytes)}"
    )


def loss_sentence(run: RunFiles) -> str:
    losses = _first_and_last_loss(run)
    if losses is None:
        return ""
    held_out = [step.eval_loss for step in run.steps if step.eval_loss is not None]
    best = run.run.best_eval_loss if run.run else min(held_out, default=None)
    first, final = map(format_number, losses)
    rest = "." if best is None else f"; at best {format_number(best)} on the held-out rows."
    return f"The loss went from {first} in the first step to {final} in the last{rest}"


def _tiles(run: RunFiles, measured: Measured) -> list[Html]:
    tiles = []
    if measured.peak_bytes:
        tiles.append(_tile("Peak memory", format_bytes(measured.peak_bytes), _predicted(run)))
    if losses := _first_and_last_loss(run):
        text = " → ".join(format_number(loss, digits=3) for loss in losses)
        tiles.append(_tile("Loss", text, "nats per token"))
    if measured.tokens_per_second:
        rate, unit = format_rate(measured.tokens_per_second).split()
        tiles.append(_tile("Throughput", rate, unit + _mfu(run)))
    if run.run:
        return tiles + _report_tiles(run.run)
    if run.steps:
        last = run.steps[-1]
        tiles.append(_tile("Progress", f"{last.step:,}", f"of {last.total_steps:,} steps"))
    return tiles


def _report_tiles(report: RunReport) -> list[Html]:
    supervised = _share(report.supervised_tokens, report.tokens, "supervised")
    trained = _share(report.trainable_parameters, report.total_parameters, "of parameters")
    return [
        _tile("Time", format_seconds(report.seconds), f"{report.steps:,} of {report.total_steps:,} steps"),
        _tile("Tokens", format_count(report.tokens), supervised),
        _tile("Trained", format_count(report.trainable_parameters), trained),
    ]


def _tile(name: str, value: str, below: str) -> Html:
    lines = (element("dt", name), element("dd", value, class_="value"), element("dd", below))
    return element("div", *lines, class_="tile")


def _predicted(run: RunFiles) -> str:
    return (
        f"predicted {format_bytes(run.estimate.memory.tensor_peak_bytes)}"
        if run.estimate
        else "not predicted"
    )


def _first_and_last_loss(run: RunFiles) -> tuple[float, float] | None:
    if run.run and run.run.steps:
        return run.run.first_loss, run.run.final_loss
    return (run.steps[0].loss, run.steps[-1].loss) if run.steps else None


def _mfu(run: RunFiles) -> str:
    """Empty when the peak of the device is not known."""
    mfu = run.run.mfu if run.run else run.steps[-1].mfu
    return f", MFU {format_percent(mfu)}" if mfu else ""


def _share(part: int, whole: int, what: str) -> str:
    return f"{format_percent(part / whole)} {what}" if whole else ""


def _without_report(run: RunFiles) -> str:
    return (
        "There is no report.json: the run is still going, or it was stopped before it could write one. "
        f"The page shows the {len(run.steps):,} steps recorded so far."
    )
