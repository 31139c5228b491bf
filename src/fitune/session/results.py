"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns.

Each kind of result has its words beside it, loaded for results of that kind: a plan loads no reports and no fleets.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from fitune.errors import RecipeError
from fitune.planner.reasons.explain import explain_plan, plan_data
from fitune.spec.predictions import PlanReport
from fitune.spec.serial import to_data

if TYPE_CHECKING:
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.clusters.ranking import Ranking
    from fitune.planner.matrix import Matrix
    from fitune.session.alternatives import LargestThatFit, WithChange
    from fitune.session.rehearsing import Rehearsed
    from fitune.session.reported import Reported
    from fitune.session.score.lm_eval_words import TaskScores
    from fitune.spec.reports import RunReport, ScoreReport


Result: TypeAlias = (
    "PlanReport | Ranking[Any] | WithChange | LargestThatFit | Matrix | Rehearsed | Reported | ScoreReport | "
    "AnsweringReport | TaskScores"
)  # fmt: skip


def text_of(result: Result) -> str:
    """The text that the command prints for ``result``, without a newline at the end."""
    text: str = _ways(result)[0](result)
    return text


def result_data(result: Result) -> dict[str, Any]:
    """The object that the command prints with ``--json``."""
    data: dict[str, Any] = _ways(result)[1](result)
    return data


def notebook_text(result: "Result | RunReport") -> str:
    """The text that a notebook shows: of a plan the verdict, of a run its outcome, else what the command prints."""
    from fitune.planner.first_screen import short_plan
    from fitune.session.reported import outcome_lines
    from fitune.spec.reports import RunReport

    if isinstance(result, PlanReport):
        return short_plan(result)
    if not isinstance(result, RunReport):
        return text_of(result)
    ended = f"{result.status}: {result.reason}" if result.reason else result.status
    exported = [f"export:  {result.exported}"] if result.exported else []
    return "\n".join([ended, *outcome_lines(result), *exported])


def _ways(result: Any) -> tuple[Callable[[Any], str], Callable[[Any], Any]]:
    """Text and data of a result. Raises RecipeError for what no command answers."""
    if isinstance(result, PlanReport):
        return explain_plan, plan_data
    from fitune.planner.alternatives import (
        alternative_data,
        explain_alternative,
        explain_largest,
        largest_data,
    )
    from fitune.planner.answering import AnsweringReport
    from fitune.planner.clusters.ranking import Ranking
    from fitune.planner.matrix import Matrix, explain_matrix, matrix_data
    from fitune.session.alternatives import LargestThatFit, WithChange
    from fitune.session.rehearsing import Rehearsed, explain_rehearsed, rehearsed_data
    from fitune.session.reported import Reported, explain_reported, explain_score, reported_data
    from fitune.session.score.lm_eval_words import TaskScores, explain_tasks
    from fitune.spec.reports import ScoreReport

    match result:
        case Ranking() | AnsweringReport():
            return type(result).text, type(result).data
        case WithChange(report=report, alternative=other):
            return (
                lambda _: explain_alternative(other),
                lambda _: {**plan_data(report), "why": alternative_data(other)},
            )
        case LargestThatFit(recipe=recipe, quantity=quantity, found=found):
            return (
                lambda _: explain_largest(recipe, quantity, found),
                lambda _: largest_data(quantity, found),
            )
        case Matrix():
            return explain_matrix, matrix_data
        case Rehearsed():
            return explain_rehearsed, rehearsed_data
        case Reported():
            return explain_reported, reported_data
        case ScoreReport():
            return explain_score, to_data
        case TaskScores():
            return explain_tasks, to_data
    raise RecipeError(
        f"{type(result).__name__} has no text", hint="explain what plan, rehearse, score or report returned"
    )
