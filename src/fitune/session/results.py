"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns."""

from typing import Any

from fitune.planner.alternatives import alternative_data, explain_alternative, explain_largest, largest_data
from fitune.planner.explain import explain_plan, plan_data
from fitune.planner.matrix import Matrix, explain_matrix, matrix_data
from fitune.session.planning import LargestThatFit, WithChange
from fitune.session.rehearsing import Rehearsed, explain_rehearsal, rehearsed_data
from fitune.session.reporting import Reported, explain_reported, reported_data
from fitune.spec.reports import PlanReport, ScoreReport
from fitune.spec.serial import to_data
from fitune.units import format_percent, format_seconds

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
