"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.planner.alternatives import alternative_data, explain_alternative, explain_largest, largest_data
from fitune.planner.explain import explain_plan, plan_data
from fitune.planner.matrix import Matrix, explain_matrix, matrix_data
from fitune.report.compare import Row, compare, comparison_table
from fitune.report.run_files import read_run
from fitune.session.planning import LargestThatFit, Rehearsed, WithChange, explain_rehearsal, rehearsed_data
from fitune.spec.reports import PlanReport, RunReport, ScoreReport
from fitune.spec.serial import to_data
from fitune.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was predicted and measured of a run, and its page."""

    directory: Path
    rows: tuple[Row, ...]
    run: RunReport | None
    """None while the run is going, and when it was killed."""
    page: Path


Result = PlanReport | WithChange | LargestThatFit | Matrix | Rehearsed | Reported | ScoreReport


def text_of(result: Result) -> str:
    """What the command prints for ``result``, without a newline at the end."""
    match result:
        case PlanReport():
            return explain_plan(result)
        case WithChange():
            return explain_alternative(result.alternative)
        case LargestThatFit():
            return explain_largest(result.recipe, result.quantity, result.found)
        case Matrix():
            return explain_matrix(result)
        case Rehearsed():
            return explain_rehearsal(result)
        case Reported():
            return explain_reported(result)
        case ScoreReport():
            return _explain_score(result)


def data_of(result: Result) -> dict[str, Any]:
    """The object that the command prints with ``--json``."""
    match result:
        case PlanReport():
            return plan_data(result)
        case WithChange():
            return {**plan_data(result.report), "why": alternative_data(result.alternative)}
        case LargestThatFit():
            return largest_data(result.quantity, result.found)
        case Matrix():
            return matrix_data(result)
        case Rehearsed():
            return rehearsed_data(result)
        case Reported():
            return reported_data(result)
        case ScoreReport():
            data: dict[str, Any] = to_data(result)
            return data


def _explain_score(report: ScoreReport) -> str:
    grades = "  ".join(f"{name} {format_percent(value)}" for name, value in report.grades.items())
    failed = f", {report.failed} failed" if report.failed else ""
    return (
        f"{grades}\n{report.answered} of {report.rows} rows answered{failed} in {format_seconds(report.seconds)}, "
        f"{report.generated_tokens:,} tokens generated"
    )


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
