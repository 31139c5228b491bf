"""Measured beside predicted figures of a run, and the grades of a scoring: as text for people, as data for programs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import RunDirectoryError
from fitune.files import cache_folder, remove
from fitune.stores.opening import is_url
from fitune.units import (
    counted,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_seconds,
    text_table,
)
from fitune.values.predictions import ShownInNotebooks
from fitune.values.reports import RunReport, ScoreReport
from fitune.values.serial import to_data
from fitune.values.words import describe_interval, describe_mean

if TYPE_CHECKING:
    from fitune.report.compare import Figure
    from fitune.track.record import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(ShownInNotebooks):
    """Predicted and measured figures of a run, and its page."""

    directory: Path
    rows: "tuple[Figure, ...]"
    run: RunReport | None
    """None while the run is going, and when it was killed."""
    page: Path
    remarks: tuple[str, ...] = ()
    """Steps that took much longer than the others."""
    state: str = ""
    """Progress of a run without a report, and whether anybody goes on with it; empty for one with a report."""
    trackers: "tuple[Tracked, ...]" = ()

    def text(self) -> str:
        """The table, how the run ended if it did not end well, and where its page is."""
        lines, run = [comparison_text(self)], self.run
        if run is None:
            lines.append(self.state)
        else:
            lines += outcome_lines(run)
            if run.reason:
                lines.append(f"the run is {run.status}: {run.reason}")
        lines += [one.describe() for one in self.trackers]
        return "\n".join([*lines, f"report: {self.page}"])

    def data(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "run": str(self.directory),
            "report": str(self.page),
            "comparison": rows_data(self.rows),
            "ranks": [] if self.run is None else to_data(self.run.ranks),
            "remarks": list(self.remarks),
            "state": self.state,
            "trackers": to_data(self.trackers),
        }


def report_anywhere(run: str) -> Reported:
    """``report_run`` of a run that may be behind a URL: what it says of itself is fetched into fitune's cache.

    Raises RunDirectoryError for one that has not ended, whose newest steps are where it trains, and StoreError.
    """
    if not is_url(run):
        return report_run(Path(run))
    from fitune.planner.defaults import staging_of
    from fitune.stores.writing import opened_store
    from fitune.train.uploading import fetch_papers

    directory = cache_folder() / "reports" / staging_of(run)
    remove(directory)
    with opened_store(run) as store:
        fetch_papers(store, directory)
    if not (directory / "report.json").is_file():
        where = "its run has not ended" if (directory / "plan.json").is_file() else "no run of fitune"
        raise RunDirectoryError(
            f"{run}: no report.json there: {where}", hint="fitune report of the run's own directory"
        )
    return report_run(directory)


def report_run(directory: Path) -> Reported:
    """Compare predicted and measured, and write report.html. Raises RunDirectoryError."""
    from fitune.report.page import write_page
    from fitune.report.run_page import page_of
    from fitune.report.run_words import long_steps, state_line
    from fitune.session.watching import RunView

    files, under_way = RunView(directory).look()
    page = write_page(directory / "report.html", page_of(files, under_way))
    rows = tuple(files.comparison)
    remarks = tuple(long_steps(files.steps, files.run))
    state = "" if under_way is None else state_line(under_way)
    return Reported(
        directory=directory,
        rows=rows,
        run=files.run,
        page=page,
        remarks=remarks,
        state=state,
        trackers=files.trackers,
    )


def watched_run(run: str | Path, *, log: Callable[[str], None], every_s: float = 5.0) -> Reported:
    """Write report.html again and again until the run has ended, then like ``report_run``. A signal ends it with a page
    that is not loaded again, and the program with it."""
    from fitune.session.watching import watch_run

    if is_url(str(run)):
        raise RunDirectoryError(
            f"--watch reads a run's directory, not {run}", hint="leave --watch out once the run has ended"
        )
    directory = Path(run)
    has_ended = watch_run(directory, log=log, every_s=every_s)
    if not has_ended and not (directory / "plan.json").exists():  # it has not begun
        raise SystemExit(0)
    reported = report_run(directory)
    if not has_ended:
        raise SystemExit(0)
    return reported


def comparison_text(reported: Reported) -> str:
    """Predicted beside measured, the time of each rank, and what was unusual."""
    from fitune.report.compare import comparison_table
    from fitune.report.run_words import RANK_HEADINGS, rank_rows

    parts = [comparison_table(reported.rows)]
    if ranks := rank_rows(() if reported.run is None else reported.run.ranks):
        parts.append(text_table([RANK_HEADINGS, *ranks]))
    return "\n".join([*parts, *reported.remarks])


def outcome_lines(run: RunReport) -> Iterator[str]:
    """Yields what training did: steps and time, the loss, and that of held-out rows before and after."""
    if not run.steps:
        return
    yield f"trained: {counted(run.steps, 'step')}, {format_count(run.tokens)} tokens in {format_seconds(run.seconds)}"
    held_out = ""
    if run.eval_loss is not None:
        before = "" if run.eval_loss_before is None else f"{format_number(run.eval_loss_before)} → "
        held_out = f"; on held-out rows {before}{format_number(run.eval_loss)}"
    yield f"loss:    {format_number(run.first_loss)} → {format_number(run.final_loss)}{held_out}"


NO_EXPORT: dict[str, Any] = {
    "exported": None,
    "dtype": None,
    "merged_loss": None,
    "sent": None,
    "hub": None,
    "next": [],
}
"""Keys of ``--json`` about the export, for a run that has none yet."""

_OUTCOME = (
    "status", "reason", "steps", "tokens", "seconds", "tokens_per_second", "first_loss", "final_loss",
    "eval_loss_before", "eval_loss", "best_eval_loss",
)  # fmt: skip


def outcome_data(run: RunReport, directory: Path) -> dict[str, Any]:
    """The figures of ``outcome_lines`` and the peak in bytes, as keys of ``--json``."""
    return {
        "run": directory,
        "report": directory / "report.html",
        **{name: getattr(run, name) for name in _OUTCOME},
        "peak_bytes": None if run.memory is None else run.memory.peak_bytes,
    }


def rows_data(rows: "Iterable[Figure]") -> list[dict[str, Any]]:
    """Predicted beside measured figures, with the relative error."""
    names = ("what", "predicted", "measured", "error")
    return [{name: getattr(row, name) for name in names} for row in rows]


def explain_score(report: ScoreReport) -> str:
    """Grades, rows, tokens and seconds of a scoring, in words."""
    grades = "".join(f"{_explain_grade(report, name)}\n" for name in report.grades)
    failed = f", {report.failed} failed" if report.failed else ""
    cut = ""
    if report.cut_off:
        share = format_percent(report.cut_off / report.rows)
        ended = f"{counted(report.cut_off, 'answer')} ({share})"
        cut = f"\ncut off at max_new_tokens: {ended}; --max-new-tokens allows more"
    done = "scored" if report.weighed_tokens else "answered"
    tokens = (
        f"likelihood of {report.weighed_tokens:,} tokens of given answers, none generated"
        if report.weighed_tokens
        else f"{report.generated_tokens:,} tokens generated"
    )
    rows = f"{report.answered:,} of {counted(report.rows, 'row')} {done}{failed}"
    memory = ""
    if report.measured_bytes:
        error = format_percent(report.predicted_bytes / report.measured_bytes - 1, signed=True)
        memory = (
            f"\nfirst batch: {format_bytes(report.predicted_bytes)} of tensors predicted, "
            f"{format_bytes(report.measured_bytes)} measured ({error})"
        )
    took = f"in {format_seconds(report.seconds)}"
    if report.rows_asked < report.rows:  # the others have answers of earlier starts
        took = f"({report.rows_asked:,} asked now, {took})"
    return f"{grades}{rows} {took}, {tokens}{cut}{memory}"


def _explain_grade(report: ScoreReport, name: str) -> str:
    """``choice 45.0 % (38.1 % to 52.0 %): rows whose likeliest choice is the right one; 2 of 100 not graded``."""
    ends = describe_interval(report, name)
    interval = f" ({ends})" if ends else ""
    measures = f": {report.measures[name]}" if name in report.measures else ""
    rows = counted(report.rows, "row")
    ungraded = report.ungraded.get(name, 0)
    left = f"; {ungraded:,} of {rows} not graded" if ungraded else ""
    failed = report.grader_errors.get(name, 0)
    errors = f"; the grader failed for {counted(failed, 'row')}" if failed else ""
    return f"{name} {describe_mean(report, name)}{interval}{measures}{left}{errors}"
