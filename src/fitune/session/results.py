"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fitune.errors import RecipeError
from fitune.planner.alternatives import alternative_data, explain_alternative, explain_largest, largest_data
from fitune.planner.explain import explain_plan, plan_data, unit_for
from fitune.session.planning import LargestThatFit, Rehearsed, WithChange
from fitune.spec.predictions import Estimate, PlanReport, Rehearsal
from fitune.spec.serial import to_data
from fitune.spec.words import describe_plan
from fitune.units import format_bytes, format_percent, wrapped

if TYPE_CHECKING:  # those who only plan load no reports and no fleets
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.fleet import Ranking
    from fitune.planner.matrix import Matrix
    from fitune.session.reported import Reported
    from fitune.spec.reports import ScoreReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The clusters of a fleet in their order."""

    ranking: "Ranking"


Result: TypeAlias = (
    "PlanReport | Ranked | WithChange | LargestThatFit | Matrix | Rehearsed | Reported | ScoreReport | "
    "AnsweringReport"
)  # fmt: skip


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
        case Rehearsed():
            return _explain_rehearsal(result)
    from fitune.planner.answering import AnsweringReport  # a plan loads none of these
    from fitune.planner.answering_words import explain_answering
    from fitune.planner.matrix import Matrix, explain_matrix
    from fitune.session.reported import Reported, explain_reported, explain_score
    from fitune.spec.reports import ScoreReport

    match result:
        case Matrix():
            return explain_matrix(result)
        case Reported():
            return explain_reported(result)
        case ScoreReport():
            return explain_score(result)
        case AnsweringReport():
            return explain_answering(result)
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
        case Rehearsed():
            return _rehearsed_data(result)
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.answering_words import answering_data
    from fitune.planner.matrix import Matrix, matrix_data
    from fitune.session.reported import Reported, reported_data

    match result:
        case Matrix():
            return matrix_data(result)
        case Reported():
            return reported_data(result)
        case AnsweringReport():
            return answering_data(result)
        case _:
            data: dict[str, Any] = to_data(result)
            return data


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
