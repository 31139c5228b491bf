"""Results as text for people and as data for programs: what the commands print, and what ``fitune.explain`` returns.

A result has both itself, but for those of rooms that know no words.
"""

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from fitune.errors import RecipeError
from fitune.planner.explain import explain_plan, plan_data
from fitune.values.predictions import PlanReport, ShownInNotebooks

if TYPE_CHECKING:
    from fitune.values.reports import ScoreReport


@runtime_checkable
class Printed(Protocol):
    """A result with its own text and data."""

    def text(self) -> str:
        """Text for people."""
        ...

    def data(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        ...


Result: TypeAlias = "PlanReport | ScoreReport | Printed"


def text_of(result: "Result | ShownInNotebooks") -> str:
    """The text that the command prints for ``result``, without a newline at the end. Raises RecipeError for what no
    command answers."""
    from fitune.session.reported import explain_score
    from fitune.values.reports import ScoreReport

    if isinstance(result, PlanReport):
        return explain_plan(result)
    if isinstance(result, ScoreReport):
        return explain_score(result)
    if isinstance(result, Printed):
        return result.text()
    raise RecipeError(
        f"{type(result).__name__} has no text", hint="explain what plan, rehearse, score or report returned"
    )


def result_data(result: Result) -> Any:
    """The object that the command prints with ``--json``."""
    if isinstance(result, PlanReport):
        return plan_data(result)
    return result.data() if isinstance(result, Printed) else result


def notebook_text(result: ShownInNotebooks) -> str:
    """The text that a notebook shows: of a plan the verdict, of a run its outcome, else what the command prints."""
    from fitune.planner.first_screen import short_plan
    from fitune.session.reported import outcome_lines
    from fitune.values.reports import RunReport

    if isinstance(result, PlanReport):
        return short_plan(result)
    if not isinstance(result, RunReport):
        return text_of(result)
    ended = f"{result.status}: {result.reason}" if result.reason else result.status
    exported = [f"export:  {result.exported}"] if result.exported else []
    return "\n".join([ended, *outcome_lines(result), *exported])
