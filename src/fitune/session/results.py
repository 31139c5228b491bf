"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import RecipeError
from fitune.planner.alternatives import alternative_data, explain_alternative, explain_largest, largest_data
from fitune.planner.explain import explain_plan, plan_data, unit_for
from fitune.planner.matrix import Matrix, explain_matrix, matrix_data
from fitune.session.planning import LargestThatFit, Rehearsed, WithChange
from fitune.spec.predictions import Estimate, PlanReport, Rehearsal
from fitune.spec.reports import RunReport, ScoreReport
from fitune.spec.serial import to_data
from fitune.spec.words import describe_grade, describe_plan
from fitune.units import format_bytes, format_percent, format_seconds, wrapped

if TYPE_CHECKING:  # those who only plan load no reports and no fleets
    from fitune.planner.fleet import Ranking
    from fitune.report.compare import Row
    from fitune.track.record import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was predicted and measured of a run, and its page."""

    directory: Path
    rows: "tuple[Row, ...]"
    run: RunReport | None
    """None while the run is going, and when it was killed."""
    page: Path
    remarks: tuple[str, ...] = ()
    """Steps that took much longer than the others."""
    state: str = ""
    """How far a run without a report is, and whether anybody goes on with it; empty for one with a report."""
    trackers: "tuple[Tracked, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The clusters of a fleet in their order."""

    ranking: "Ranking"


Result = PlanReport | Ranked | WithChange | LargestThatFit | Matrix | Rehearsed | Reported | ScoreReport


def text_of(result: Result) -> str:
    """What the command prints for ``result``, without a newline at the end."""
    match result:
        case PlanReport():
            return explain_plan(result)
        case Ranked():
            from fitune.planner.fleet_words import explain_ranking

            return explain_ranking(result.ranking)
        case WithChange():
            return explain_alternative(result.alternative)
        case LargestThatFit():
            return explain_largest(result.recipe, result.quantity, result.found)
        case Matrix():
            return explain_matrix(result)
        case Rehearsed():
            return _explain_rehearsal(result)
        case Reported():
            return _explain_reported(result)
        case ScoreReport():
            return _explain_score(result)
        case _:
            raise RecipeError(
                f"{type(result).__name__} has no text",
                hint="explain what plan, rehearse, score or report returned",
            )


def data_of(result: Result) -> dict[str, Any]:
    """The object that the command prints with ``--json``."""
    match result:
        case PlanReport():
            return plan_data(result)
        case Ranked():
            from fitune.planner.fleet_words import ranking_data

            return ranking_data(result.ranking)
        case WithChange():
            return {**plan_data(result.report), "why": alternative_data(result.alternative)}
        case LargestThatFit():
            return largest_data(result.quantity, result.found)
        case Matrix():
            return matrix_data(result)
        case Rehearsed():
            return _rehearsed_data(result)
        case Reported():
            return _reported_data(result)
        case ScoreReport():
            data: dict[str, Any] = to_data(result)
            return data


def _explain_score(report: ScoreReport) -> str:
    grades = "\n".join(_explain_grade(report, name) for name in report.grades)
    failed = f", {report.failed} failed" if report.failed else ""
    cut = ""
    if report.cut_off:
        share = format_percent(report.cut_off / report.rows)
        cut = f"\n{report.cut_off:,} answers ({share}) were cut off at max_new_tokens; --max-new-tokens allows more"
    done = "weighed" if report.weighed_tokens else "answered"
    tokens = (
        f"{report.weighed_tokens:,} tokens of given answers weighed, none written"
        if report.weighed_tokens
        else f"{report.generated_tokens:,} tokens generated"
    )
    return (
        f"{grades}\n{report.answered} of {report.rows} rows {done}{failed} in {format_seconds(report.seconds)}, "
        f"{tokens}{cut}"
    )


def _explain_grade(report: ScoreReport, name: str) -> str:
    """``choice 45.0 % (38.1 % to 52.0 %): rows whose likeliest choice is the right one; 2 of 100 not graded``."""
    scale = report.scales.get(name, "share")
    low, high = report.intervals.get(name, (0.0, 0.0))
    interval = f" ({describe_grade(low, scale)} to {describe_grade(high, scale)})" if high > low else ""
    measures = f": {report.measures[name]}" if name in report.measures else ""
    left = f"; {report.ungraded[name]} of {report.rows} rows not graded" if name in report.ungraded else ""
    errors = (
        f"; the grader failed for {report.grader_errors[name]} rows" if name in report.grader_errors else ""
    )
    return f"{name} {describe_grade(report.grades[name], scale)}{interval}{measures}{left}{errors}"


def report_run(directory: Path) -> Reported:
    """Compare predicted and measured, and write report.html. Raises RunDirectoryError."""
    from fitune.report.compare import compare
    from fitune.report.html import page_of, write_page
    from fitune.report.ranks import long_steps
    from fitune.report.under_way import state_line
    from fitune.session.watching import RunView

    files, under_way = RunView(directory).look()
    page = write_page(directory / "report.html", page_of(files, under_way))
    rows = tuple(compare(files.estimate, files.run, files.steps))
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


def watched_run(directory: Path, *, tell: Callable[[str], None], every_s: float = 5.0) -> Reported:
    """Write report.html again and again until the run has ended, then like ``report_run``. A signal ends it with a page
    that is not loaded again, and the program with it."""
    from fitune.session.watching import watch_run

    has_ended = watch_run(directory, tell=tell, every_s=every_s)
    reported = report_run(directory)
    if not has_ended:
        raise SystemExit(0)
    return reported


def comparison_text(reported: Reported) -> str:
    """Predicted beside measured, the time of each rank, and what was unusual."""
    from fitune.report.compare import comparison_table, text_table
    from fitune.report.ranks import RANK_HEADINGS, rank_rows

    parts = [comparison_table(reported.rows)]
    if ranks := rank_rows(() if reported.run is None else reported.run.ranks):
        parts.append(text_table([RANK_HEADINGS, *ranks]))
    return "\n".join([*parts, *reported.remarks])


def _explain_reported(reported: Reported) -> str:
    """The table, how the run ended if it did not end well, and where its page is."""
    lines = [comparison_text(reported)]
    run = reported.run
    if run is None:
        lines.append(reported.state)
    elif run.reason:
        lines.append(f"the run is {run.status}: {run.reason}")
    lines += [one.describe() for one in reported.trackers]
    return "\n".join([*lines, f"report: {reported.page}"])


def _reported_data(reported: Reported) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    rows = [
        {"what": row.what, "predicted": row.predicted, "measured": row.measured, "error": row.error}
        for row in reported.rows
    ]
    ranks = [] if reported.run is None else to_data(reported.run.ranks)
    return {
        "run": str(reported.directory),
        "report": str(reported.page),
        "comparison": rows,
        "ranks": ranks,
        "remarks": list(reported.remarks),
        "state": reported.state,
        "trackers": to_data(reported.trackers),
    }


def _rehearsed_data(rehearsed: Rehearsed) -> dict[str, Any]:
    """The plan as ``--json`` prints it, and an object ``rehearsal`` in it."""
    rehearsal = rehearsed.rehearsal
    figures = {
        "peak_bytes": rehearsal.peak_bytes,
        "tensor_peak_bytes": rehearsal.tensor_peak_bytes,
        "reserved_bytes": rehearsal.reserved_bytes,
        "layers_traced": rehearsal.layers_traced,
        "phases": {phase.value: dict(kinds) for phase, kinds in rehearsal.phases.items()},
        "outside": dict(rehearsal.outside),
    }
    return {**plan_data(rehearsed.report), "rehearsal": figures}


def _explain_rehearsal(rehearsed: Rehearsed) -> str:
    """Estimated and rehearsed bytes of every phase, then what the peak is made of."""
    report, rehearsal = rehearsed.report, rehearsed.rehearsal
    plan, estimate = report.chosen.plan, report.chosen.estimate
    traced, layers = rehearsal.layers_traced, plan.model.num_layers
    how = "every block traced" if traced == layers else f"{traced} of {layers} blocks traced"
    return "\n".join(
        [
            f"{plan.model.name} · the second step of",
            wrapped(describe_plan(plan)),
            wrapped(f"on fake tensors, {how}"),
            "",
            *_rehearsal_table(estimate, rehearsal),
            "",
            wrapped(_kinds_line(rehearsal)),
            wrapped(
                f"torch's allocator would reserve {format_bytes(rehearsal.reserved_bytes)} for these tensors "
                "(expandable segments)"
            ),
        ]
    )


def _rehearsal_table(estimate: Estimate, rehearsal: Rehearsal) -> list[str]:
    rows = [("", "estimated", "rehearsed", "error")]
    for phase, kinds in rehearsal.phases.items():
        rows.append(
            _rehearsal_row(phase.value, sum(estimate.memory.phases[phase].values()), sum(kinds.values()))
        )
    rows.append(
        _rehearsal_row("peak of tensors", estimate.memory.tensor_peak_bytes, rehearsal.tensor_peak_bytes)
    )
    if rehearsal.outside:
        rows.append(_rehearsal_row("with overheads", estimate.peak_bytes, rehearsal.peak_bytes))
    return [f"  {name:<16}{one:>14}{other:>14}{error:>11}" for name, one, other, error in rows]


def _rehearsal_row(name: str, estimated: int, rehearsed: int) -> tuple[str, str, str, str]:
    error = format_percent(estimated / rehearsed - 1, signed=True)
    return name, format_bytes(estimated), format_bytes(rehearsed), error


def _kinds_line(rehearsal: Rehearsal) -> str:
    """``backward: weights 15.0 + activations 2.1 + … = 17.4 GiB``."""
    phase = max(rehearsal.phases, key=lambda p: sum(rehearsal.phases[p].values()))
    unit, name = unit_for(rehearsal.tensor_peak_bytes)
    shown = [f"{kind} {size / unit:,.2f}" for kind, size in rehearsal.phases[phase].items()]
    return f"{phase.value}: {' + '.join(shown)} = {rehearsal.tensor_peak_bytes / unit:,.2f} {name}"
