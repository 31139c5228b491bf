"""A plan and its own step on fake tensors, beside each other as text and as data."""

from dataclasses import dataclass
from typing import Any

from fitune.planner.reasons.explain import plan_data, unit_for
from fitune.session.planning import for_its_rows, plan_for
from fitune.spec.notebook import ShownInNotebooks
from fitune.spec.predictions import Estimate, PlanReport, Rehearsal
from fitune.spec.recipe.recipe import Recipe
from fitune.spec.words import describe_plan
from fitune.units import format_bytes, format_percent, wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed(ShownInNotebooks):
    """A plan, and what its own step took on fake tensors."""

    report: PlanReport
    rehearsal: Rehearsal


def rehearse_recipe(recipe: Recipe, *, exact: bool) -> Rehearsed:
    """Plan among what can be rehearsed, then rehearse what was chosen. ``exact`` traces every block."""
    report = plan_for(for_its_rows(recipe), purposes=("plan", "rehearse"))
    from fitune.rehearse.step import rehearse

    chosen = report.chosen
    rehearsal = rehearse(chosen.plan, exact=exact, outside=chosen.estimate.memory.outside)
    return Rehearsed(report=report, rehearsal=rehearsal)


def rehearsed_data(rehearsed: Rehearsed) -> dict[str, Any]:
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


def explain_rehearsed(rehearsed: Rehearsed) -> str:
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
