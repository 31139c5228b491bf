"""Beside the plan of a recipe: its own step on fake tensors, what a change of it would cost, the largest that fits, and
the plans of many models and many lengths of rows."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.planner.explain import plan_data, priced_data, unit_for
from fitune.planner.first_screen import changed_recipe
from fitune.planner.matrix import LEGEND, Matrix, card, matrix, short_name
from fitune.planner.study import explain_change, explain_largest, largest, largest_data, plan_with_change
from fitune.recipe.recipe import Recipe
from fitune.recipe.types import MOST
from fitune.session.planning import for_its_rows, plan_for, wanted_hardware
from fitune.units import format_bytes, format_percent, whole_number, wrapped
from fitune.values.model.model_config import load_model_spec
from fitune.values.predictions import PlanReport, Rehearsal, ShownInNotebooks
from fitune.values.words import describe_plan, devices_with_memory


def plan_with(recipe: Recipe, change: str) -> tuple[str, dict[str, Any]]:
    """The plan beside the best plan with the settings of ``zero: 3, backend: fsdp`` on top, and what they cost: as
    text, and as the plan's data with an object ``why`` in it."""
    recipe = for_its_rows(recipe)
    changed = changed_recipe(recipe, change)
    report = plan_for(recipe)
    taken = report.taken
    pinned = plan_with_change(
        changed, change, taken=taken, model=load_model_spec(changed.model), hardware=wanted_hardware(changed)
    )
    text = explain_change(change, taken=taken, pinned=pinned, objective=changed.objective)
    why = {
        "change": change, "fits": pinned.estimate.fits,
        "taken": priced_data(taken), "pinned": priced_data(pinned),
    }  # fmt: skip
    return text, {**plan_data(report), "why": why}


def largest_for(recipe: Recipe, quantity: str) -> tuple[str, dict[str, Any]]:
    """The largest ``seq_len``, ``micro_batch`` or ``model`` that fits, by each method that the recipe leaves open: as
    text and as data. Raises RecipeError for another quantity."""
    recipe = for_its_rows(recipe)
    quantity = quantity.replace("-", "_").removesuffix("_size")
    found = largest(recipe, quantity, model=load_model_spec(recipe.model), hardware=wanted_hardware(recipe))
    return explain_largest(recipe, quantity, found), largest_data(quantity, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed(ShownInNotebooks):
    """A plan, and what its own step took on fake tensors."""

    report: PlanReport
    rehearsal: Rehearsal

    def data(self) -> dict[str, Any]:
        """The plan as ``--json`` prints it, and an object ``rehearsal`` in it."""
        found = self.rehearsal
        names = ("peak_bytes", "tensor_peak_bytes", "reserved_bytes", "layers_traced")
        figures = {name: getattr(found, name) for name in names}
        figures["phases"] = {phase.value: dict(kinds) for phase, kinds in found.phases.items()}
        return {**plan_data(self.report), "rehearsal": {**figures, "outside": dict(found.outside)}}

    def text(self) -> str:
        """Estimated and rehearsed bytes of every phase, then what the peak is made of."""
        plan, estimate, found = self.report.chosen.plan, self.report.chosen.estimate, self.rehearsal
        layers = plan.model.num_layers
        traced = (
            "every block" if found.layers_traced == layers else f"{found.layers_traced} of {layers} blocks"
        )
        sizes = {
            phase.value: (sum(estimate.memory.phases[phase].values()), sum(kinds.values()))
            for phase, kinds in found.phases.items()
        }
        sizes["peak of tensors"] = (estimate.memory.tensor_peak_bytes, found.tensor_peak_bytes)
        if found.outside:
            sizes["with overheads"] = (estimate.peak_bytes, found.peak_bytes)
        rows = [("", "estimated", "rehearsed", "error")]
        for name, (one, other) in sizes.items():
            error = format_percent(one / other - 1, signed=True)
            rows.append((name, format_bytes(one), format_bytes(other), error))
        heaviest = max(found.phases, key=lambda phase: sum(found.phases[phase].values()))
        unit, name = unit_for(found.tensor_peak_bytes)
        kinds = " + ".join(f"{kind} {size / unit:,.2f}" for kind, size in found.phases[heaviest].items())
        return "\n".join(
            [
                f"{plan.model.name} · the second step of",
                wrapped(describe_plan(plan)),
                wrapped(f"on fake tensors, {traced} traced"),
                "",
                *(f"  {name:<16}{one:>14}{other:>14}{error:>11}" for name, one, other, error in rows),
                "",
                wrapped(f"{heaviest.value}: {kinds} = {found.tensor_peak_bytes / unit:,.2f} {name}"),
                wrapped(
                    f"torch's allocator would reserve {format_bytes(found.reserved_bytes)} for these tensors "
                    "(expandable segments)"
                ),
            ]
        )


def rehearse_recipe(recipe: Recipe, *, exact: bool) -> Rehearsed:
    """Plan among what can be rehearsed, then rehearse what was chosen. ``exact`` traces every block."""
    report = plan_for(for_its_rows(recipe), purposes=("plan", "rehearse"))
    from fitune.rehearse.step import rehearse

    chosen = report.chosen
    rehearsal = rehearse(chosen.plan, exact=exact, outside=chosen.estimate.memory.outside)
    return Rehearsed(report=report, rehearsal=rehearsal)


_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]", re.IGNORECASE)


def full_names(models: str) -> Iterator[str]:
    """``llama-2-7b,13b``: a size alone stands for the model before it in that size.

    Raises RecipeError for no names, and for a size that follows no name with a size in it.
    """
    before = ""
    words = [word.strip() for word in models.split(",") if word.strip()]
    if not words:
        raise RecipeError("--models names no model", hint="--models llama-2-7b,13b,70b")
    for word in dict.fromkeys(words):
        if _SIZE.fullmatch(word):
            sizes = list(_SIZE.finditer(before))
            if not sizes:
                raise RecipeError(
                    f"--models: {word} is a size, and no model with a size is named before it",
                    hint="--models llama-2-7b,13b,70b",
                )
            word = before[: sizes[-1].start()] + word + before[sizes[-1].end() :]
        yield word
        before = word


def row_lengths(context: str) -> tuple[int, ...]:
    """Whole numbers of tokens. Raises RecipeError for anything else."""
    most = int(MOST["seq_len"])
    lengths = [whole_number(word.strip(), most=most) or 0 for word in context.split(",") if word.strip()]
    if min(lengths, default=0) < 2:
        raise RecipeError(
            f"--context {context[:80]!r} is not a list of token counts from 2 to {most:,}",
            hint="--context 512,1024,2048",
        )
    return tuple(lengths)


def plan_matrix(recipe: Recipe, *, models: Sequence[str], seq_lens: Sequence[int]) -> Matrix:
    """Plan every model with every length of rows. Raises RecipeError for pins that contradict each other."""
    specs = [load_model_spec(name) for name in models]
    return matrix(recipe, models=specs, seq_lens=tuple(seq_lens), hardware=wanted_hardware(recipe))


def draw_picture(found: Matrix, path: Path) -> None:
    """Write the matrix as SVG. Raises RecipeError for another ending, MissingExtra without matplotlib."""
    from fitune.report.comparison_plots import MatrixCard, draw_matrix  # not for those who only plan

    draw_matrix(
        path,
        [[MatrixCard(*card(cell, found)) for cell in found.row(model)] for model in found.models],
        title=f"What fits on {devices_with_memory(found.hardware)}",
        rows=[short_name(model) for model in found.models],
        columns=[f"{length:,} tokens" for length in found.seq_lens],
        legend=f"{', '.join(found.shardings)}: {LEGEND}",
    )
