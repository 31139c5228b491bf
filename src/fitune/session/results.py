"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns.

Each kind of result has its words beside it, loaded for results of that kind: a plan loads no reports and no fleets.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fitune.errors import RecipeError
from fitune.planner.reasons.explain import explain_plan, plan_data
from fitune.spec.predictions import PlanReport
from fitune.spec.serial import to_data

if TYPE_CHECKING:
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.clusters.fleet import Ranking
    from fitune.planner.clusters.score_fleet import ScoreRanking
    from fitune.planner.matrix import Matrix
    from fitune.session.alternatives import LargestThatFit, WithChange
    from fitune.session.rehearsing import Rehearsed
    from fitune.session.reported import Reported
    from fitune.session.score.lm_eval_words import TaskScores
    from fitune.spec.reports import ScoreReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The clusters of a fleet in their order."""

    ranking: "Ranking"


Result: TypeAlias = (
    "PlanReport | Ranked | WithChange | LargestThatFit | Matrix | Rehearsed | Reported | ScoreReport | "
    "AnsweringReport | ScoreRanking | TaskScores"
)  # fmt: skip


def text_of(result: Result) -> str:
    """The text that the command prints for ``result``, without a newline at the end."""
    if isinstance(result, PlanReport):
        return explain_plan(result)
    from fitune.planner.alternatives import explain_alternative, explain_largest
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.answering_words import explain_answering
    from fitune.planner.clusters.fleet_words import explain_ranking
    from fitune.planner.clusters.score_fleet import ScoreRanking, explain_score_ranking
    from fitune.planner.matrix import Matrix, explain_matrix
    from fitune.session.alternatives import LargestThatFit, WithChange
    from fitune.session.rehearsing import Rehearsed, explain_rehearsed
    from fitune.session.reported import Reported, explain_reported, explain_score
    from fitune.session.score.lm_eval_words import TaskScores, explain_tasks
    from fitune.spec.reports import ScoreReport

    match result:
        case Ranked():
            return explain_ranking(result.ranking)
        case WithChange():
            return explain_alternative(result.alternative)
        case LargestThatFit():
            return explain_largest(result.recipe, result.quantity, result.found)
        case Matrix():
            return explain_matrix(result)
        case Rehearsed():
            return explain_rehearsed(result)
        case Reported():
            return explain_reported(result)
        case ScoreReport():
            return explain_score(result)
        case AnsweringReport():
            return explain_answering(result)
        case ScoreRanking():
            return explain_score_ranking(result)
        case TaskScores():
            return explain_tasks(result)
        case _:
            raise RecipeError(
                f"{type(result).__name__} has no text",
                hint="explain what plan, rehearse, score or report returned",
            )


def result_data(result: Result) -> dict[str, Any]:
    """The object that the command prints with ``--json``."""
    if isinstance(result, PlanReport):
        return plan_data(result)
    from fitune.planner.alternatives import alternative_data, largest_data
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.answering_words import answering_data
    from fitune.planner.clusters.fleet_words import ranking_data
    from fitune.planner.clusters.score_fleet import ScoreRanking, score_ranking_data
    from fitune.planner.matrix import Matrix, matrix_data
    from fitune.session.alternatives import LargestThatFit, WithChange
    from fitune.session.rehearsing import Rehearsed, rehearsed_data
    from fitune.session.reported import Reported, reported_data

    match result:
        case Ranked():
            return ranking_data(result.ranking)
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
        case AnsweringReport():
            return answering_data(result)
        case ScoreRanking():
            return score_ranking_data(result)
        case _:
            data: dict[str, Any] = to_data(result)
            return data
