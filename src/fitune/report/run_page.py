"""report.html: one run, predicted and measured."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fitune.report import plan_words, run_plots
from fitune.report.compare import PEAK, PHASE_NAMES, MeasuredRun, row_texts
from fitune.report.page import Tile, ledger_table, pictures_or_advice, render, write_page
from fitune.report.run_files import RunFiles, read_run
from fitune.report.run_words import (
    RANK_HEADINGS,
    SIGN_HEADINGS,
    UnderWay,
    clock,
    describe_restart,
    describe_retry,
    long_steps,
    rank_rows,
    restart_summary,
    sign_rows,
    state_line,
    under_way_tiles,
)
from fitune.track.record import Tracked
from fitune.units import (
    counted,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
)
from fitune.values.plan import Plan
from fitune.values.reports import Restart


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into the directory of a run that has ended. Raises RunDirectoryError."""
    return write_page(directory / "report.html", page_of(read_run(directory)))


def page_of(run: RunFiles, under_way: UnderWay | None = None, *, refresh_s: int = 0) -> str:
    """The page of a run; a browser loads it again every ``refresh_s`` seconds, 0 for never.

    Without matplotlib the page says how to get the pictures.
    """
    pictures, advice = pictures_or_advice(lambda: draw_pictures(run), without={"memory": ""})
    told = run.run.retries if run.run else tuple(retry for step in run.steps for retry in step.retries)
    restarts = [one for step in run.steps for one in step.restarts]
    ledgers = {"Training": run.run.train_data, "Held out": run.run.eval_data} if run.run else {}
    return render(
        "run.html",
        scripts=() if advice else ("hover.js",),
        title=f"{run.directory.name}: fitune report",
        refresh_s=refresh_s,
        run=run,
        **_head(run, under_way, restarts),
        sign_headings=SIGN_HEADINGS,
        signs=sign_rows(under_way.signs) if under_way else [],
        **_prediction(run),
        pictures=pictures,
        advice=advice,
        loss=_loss_sentence(run),
        curve_ends=_curve_ends(run),
        retries=[line for retry in told for line in describe_retry(retry).splitlines()],
        restarts=[describe_restart(one) for one in restarts],
        restart_summary=restart_summary(restarts) if restarts else "",
        sentences=plan_words.sentences(run.plan, total=run.total_steps),
        settings=plan_words.settings(run.plan),
        alternatives=list(_alternatives(run)),
        rejected=[(item.what, item.why) for item in run.prediction.rejected] if run.prediction else [],
        ledgers=[
            ledger_table(title, ledger, run.plan.batch.seq_len)
            for title, ledger in ledgers.items()
            if ledger is not None
        ],
        trackers=[_tracker_row(one) for one in run.trackers],
        next_commands=commands_of_run(run.plan.run.output_dir, run.plan),
    )


def draw_pictures(run: RunFiles) -> dict[str, Any]:
    """SVG elements by name; empty where there is nothing to show. Raises MissingExtra without matplotlib."""
    phases = run.measured.phases
    drawn = {"memory": run_plots.memory_bars(run.estimate, phases) if run.estimate or phases else ""}
    if run.steps:
        predicted = run.estimate.tokens_per_second if run.estimate else None
        drawn |= {
            "loss": run_plots.loss_curve(run.steps),
            "learning_rate": run_plots.learning_rate_curve(run.steps),
            "throughput": run_plots.throughput_curve(run.steps, predicted=predicted),
            "grad_norm": run_plots.grad_norm_curve(run.steps, clipped_at=run.plan.schedule.max_grad_norm),
        }
    return drawn


def _head(run: RunFiles, under_way: UnderWay | None, restarts: Sequence[Restart]) -> dict[str, Any]:
    """Status, plan in one line, verdict, and the figures that people ask for first."""
    is_running, measured = under_way is not None and under_way.is_alive, run.measured
    tiles = list(_tiles(run, measured))
    state = "There is no report.json: the run is still going, or it was stopped before it could write one."
    if under_way is not None:
        tiles += under_way_tiles(under_way, restarts)
        line = state_line(under_way)
        state = f"{line[0].upper()}{line[1:]}."
    return {
        "status": run.run.status if run.run else "running" if is_running else "unfinished",
        "headline": plan_words.headline(run.plan),
        "verdict": _verdict(run, measured),
        "reason": run.run.reason if run.run else "" if is_running else state,
        "seen": f"As of {clock(under_way.at, at=under_way.at)}." if is_running and under_way else "",
        "tiles": tiles,
    }


def _verdict(run: RunFiles, measured: MeasuredRun) -> str:
    """The one sentence the page is about."""
    peak = measured.peak_bytes
    if run.estimate is None:
        if not peak:
            return "Memory was neither predicted nor measured."
        return f"Measured {format_bytes(peak)} at the peak; there was no prediction."
    predicted = run.estimate.memory.tensor_peak_bytes
    if not peak:
        return f"Predicted {format_bytes(predicted)} at the peak; nothing was measured."
    error = format_percent(predicted / peak - 1, signed=True)
    verdict = f"Predicted {format_bytes(predicted)}, measured {format_bytes(peak)} ({error})"
    said = run.prediction
    if said is None or not said.heaviest_step:  # the data was not known
        return verdict
    return (
        f"{verdict}, expected in step {said.heaviest_step:,} with {said.heaviest_tokens:,} tokens in a "
        f"micro-batch; the plan allows {format_bytes(said.allowed_bytes)}"
    )


def _tiles(run: RunFiles, measured: MeasuredRun) -> Iterator[Tile]:
    if measured.peak_bytes:
        peak = run.estimate and format_bytes(run.estimate.memory.tensor_peak_bytes)
        yield Tile(
            "Peak memory", format_bytes(measured.peak_bytes), f"predicted {peak}" if peak else "not predicted"
        )
    if losses := _first_and_last_loss(run):
        yield Tile("Loss", _arrow(losses), "nats per token")
    if run.run and run.run.eval_loss is not None:
        held_out = [one for one in (run.run.eval_loss_before, run.run.eval_loss) if one is not None]
        below = "before → after" if len(held_out) > 1 else "after training"
        yield Tile("Held-out loss", _arrow(held_out), below)
    if measured.tokens_per_second:
        rate, unit = format_rate(measured.tokens_per_second).split()
        mfu = run.run.mfu if run.run else run.steps[-1].mfu
        yield Tile("Throughput", rate, unit + (f", MFU {format_percent(mfu)}" if mfu else ""))
    if run.run:
        report = run.run
        done = (
            f"{report.steps:,} of {counted(report.total_steps, 'step')}, {format_count(report.tokens)} tokens"
        )
        whole = report.total_parameters
        trained = f"{format_percent(report.trainable_parameters / whole)} of parameters" if whole else ""
        yield Tile("Time", format_seconds(report.seconds), done)
        yield Tile("Trained", format_count(report.trainable_parameters), trained)
    elif run.steps:
        last = run.steps[-1]
        yield Tile("Progress", f"{last.step:,}", f"of {counted(last.total_steps, 'step')}")


def _arrow(losses: Sequence[float]) -> str:
    return " → ".join(format_number(loss, digits=3) for loss in losses)


def _first_and_last_loss(run: RunFiles) -> tuple[float, float] | None:
    if run.run and run.run.steps:
        return run.run.first_loss, run.run.final_loss
    return (run.steps[0].loss, run.steps[-1].loss) if run.steps else None


def _loss_sentence(run: RunFiles) -> str:
    losses = _first_and_last_loss(run)
    if losses is None or not run.steps:
        return ""
    held_out = [step.eval_loss for step in run.steps if step.eval_loss is not None]
    best = run.run.best_eval_loss if run.run else min(held_out, default=None)
    first, final = map(format_number, losses)
    rest = "." if best is None else f"; at best {format_number(best)} on the held-out rows."
    return f"The loss went from {first} in the first step to {final} in the last{rest}"


def _prediction(run: RunFiles) -> dict[str, Any]:
    """Predicted next to measured. The peak decides whether a plan fits: its row stands out. Phases are not timed."""
    rows = run.comparison
    parts = ["The error says how far the prediction lies above the measurement."]
    if run.run and run.run.memory:
        what = {"live tensors": "the bytes of live tensors", "cuda allocated": "the bytes CUDA had allocated"}
        parts.append(f"Measured are {what[run.run.memory.kind]}, at the peak within each phase.")
    if run.estimate:
        parts.append(f"The plan may fill {format_bytes(run.estimate.usable_bytes)}.")
    times = run.estimate.time if run.estimate else None
    return {
        "how_measured": " ".join(parts),
        "comparison": [row_texts(row) for row in rows],
        "rank_headings": RANK_HEADINGS,
        "rank_rows": rank_rows(() if run.run is None else run.run.ranks),
        "remarks": long_steps(run.steps, run.run),
        "peak_rows": [place for place, row in enumerate(rows) if row.what == PEAK],
        "phase_times": [
            (PHASE_NAMES[phase], times.limits.get(phase, ""), format_seconds(seconds))
            for phase, seconds in times.phases.items()
        ]
        if times
        else [],
    }


def _curve_ends(run: RunFiles) -> list[Sequence[str]]:
    """Rows for the first and the last step, in place of pictures."""
    ends = [run.steps[0], run.steps[-1]] if len(run.steps) > 1 else run.steps
    return [
        (
            f"{it.step:,}",
            format_number(it.loss),
            format_number(it.grad_norm),
            format_rate(it.tokens_per_second),
        )
        for it in ends
    ]


def _alternatives(run: RunFiles) -> Iterator[Sequence[str]]:
    said = run.prediction
    if said is None or not (said.runners_up or said.rejected):
        return
    own = said.estimate
    entries = [("This plan", own.peak_bytes, own.step_seconds, own.fits)]
    entries += [(it.summary, it.peak_bytes, it.step_seconds, it.fits) for it in said.runners_up]
    for summary, peak_bytes, seconds, fits in entries:
        yield summary, format_bytes(peak_bytes), format_seconds(seconds), "yes" if fits else "no"


def _tracker_row(tracked: Tracked) -> tuple[str, str, str]:
    """Name with its link, steps that arrived and were lost, and how else to see them or what went wrong."""
    from markupsafe import Markup

    name = tracked.tracker
    if tracked.link.startswith(("https://", "http://")):
        name = Markup('<a href="{}">{}</a>').format(tracked.link, name)
    steps = f"{tracked.sent:,}" + (f", {tracked.lost:,} lost" if tracked.lost else "")
    failure = f"failed: {tracked.failure}" if tracked.failure else ""
    return name, steps, "; ".join(part for part in (failure, tracked.note, tracked.command) if part)


def commands_of_run(directory: str, plan: Plan) -> list[str]:
    """Commands that use what the run in ``directory`` has exported."""
    name = shlex.quote(directory)
    commands = [f"fitune chat {name}", f"fitune score --model {name} --data QUESTIONS.jsonl"]
    if plan.run.export == "adapter":
        commands.append(f"fitune export {name}   (adapter and base as one model)")
    return commands
