"""Predicted and measured of one run, side by side, and the run's page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.report.compare import Row, compare, comparison_table
from fitune.report.run_files import read_run
from fitune.spec.reports import RunReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was predicted and measured of a run, and its page."""

    directory: Path
    rows: tuple[Row, ...]
    run: RunReport | None
    """None while the run is going, and when it was killed."""
    page: Path


def report_run(directory: Path) -> Reported:
    """Compare predicted and measured, and write report.html. Raises RunDirectoryError."""
    from fitune.report.html import write_report  # not for those who only plan

    page = write_report(directory)
    return Reported(directory=directory, rows=comparison(directory), run=read_run(directory).run, page=page)


def comparison(directory: Path) -> tuple[Row, ...]:
    """Predicted | measured of one run."""
    files = read_run(directory)
    return tuple(compare(files.estimate, files.run, files.steps))


def explain_reported(reported: Reported) -> str:
    """The table, how the run ended if it did not end well, and where its page is."""
    lines = [comparison_table(reported.rows)]
    run = reported.run
    if run is None:
        lines.append("the run has not ended: it is still going, or was killed (fitune train … --resume)")
    elif run.reason:
        lines.append(f"the run is {run.status}: {run.reason}")
    return "\n".join([*lines, f"report: {reported.page}"])


def reported_data(reported: Reported) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    rows = [
        {"what": row.what, "predicted": row.predicted, "measured": row.measured, "error": row.error}
        for row in reported.rows
    ]
    return {"run": str(reported.directory), "report": str(reported.page), "comparison": rows}
