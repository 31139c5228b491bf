"""compare.html: several ways of training the same data, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fitune.errors import MissingExtra
from fitune.report import plan_words
from fitune.report.compare import PEAK, Row, compare, row_texts
from fitune.report.method_plots import held_out_curves, loss_curves, peak_bars
from fitune.report.page import page, write_page
from fitune.report.pieces import Html, details, element, figure, items, join, section, table
from fitune.report.run_files import RunFiles
from fitune.units import format_number, format_percent, format_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRun:
    """One method: its run, or why there is none."""

    name: str
    run: RunFiles | None
    why_not: str = ""
    grades: dict[str, float] = field(default_factory=dict)


def write_comparison(directory: Path, methods: Sequence[MethodRun], *, base_grades: dict[str, float]) -> Path:
    """Write ``compare.html`` into ``directory``. Raises RunDirectoryError."""
    return write_page(directory / "compare.html", render(methods, base_grades=base_grades))


def render(methods: Sequence[MethodRun], *, base_grades: dict[str, float]) -> str:
    done = [method for method in methods if method.run is not None]
    first = next((method.run for method in done), None)
    name = first.plan.model.name if first else "nothing was trained"
    body = join(
        [
            element(
                "header",
                element("p", "fitune compare", class_="eyebrow"),
                element("h1", name),
                element("p", "The same data, order and seed, trained in different ways.", class_="subtitle"),
            ),
            section("Side by side", table(HEAD, _rows(methods, base_grades), numbers=len(HEAD) - 1)),
            section("Curves", _pictures(done)),
            section("The plans", *(_plan(method) for method in done)),
            section("Not trained", items(f"{m.name}: {m.why_not}" for m in methods if m.run is None)),
        ]
    )
    return page(f"{name}: fitune compare", body)


HEAD = (
    "", "learning rate", "loss, first → last", "held out, best", "score", "peak predicted", "measured", "error",
    "speed predicted", "measured",
)  # fmt: skip


def comparison_rows(methods: Sequence[MethodRun]) -> list[tuple[str, ...]]:
    """One row of texts a trained method, as HEAD names the columns."""
    return [_cells(method.name, method.run, method.grades) for method in methods if method.run is not None]


def _rows(methods: Sequence[MethodRun], base_grades: dict[str, float]) -> list[tuple[str, ...]]:
    base = [("base", "", "", "", _grades(base_grades), *[""] * 5)] if base_grades else []
    return [*base, *comparison_rows(methods)]


def _cells(name: str, run: RunFiles, grades: dict[str, float]) -> tuple[str, ...]:
    rows = {row.what: row for row in compare(run.estimate, run.run, run.steps)}
    _, predicted, measured, error = row_texts(rows[PEAK])
    speed = rows["Throughput"]
    report = run.run
    losses = (
        "" if report is None or not report.steps else f"{report.first_loss:.3f} → {report.final_loss:.3f}"
    )
    best = "" if report is None or report.best_eval_loss is None else format_number(report.best_eval_loss)
    return (
        name, f"{run.plan.schedule.learning_rate:g}", losses, best, _grades(grades), predicted, measured, error,
        _rate(speed.predicted), _rate(speed.measured),
    )  # fmt: skip


def _grades(grades: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_percent(value)}" for name, value in grades.items())


def _rate(value: float | None) -> str:
    return "–" if value is None else format_rate(value)


def _pictures(done: Sequence[MethodRun]) -> Html:
    """Loss, held-out loss and peaks; without matplotlib how to get them."""
    steps = {method.name: method.run.steps for method in done if method.run is not None and method.run.steps}
    if not steps:
        return Html("")
    peaks = {method.name: _peak(method.run) for method in done if method.run is not None}
    try:
        shown = [figure("Training loss, running mean", Html(loss_curves(steps)))]
        if any(step.eval_loss is not None for one in steps.values() for step in one):
            shown.append(figure("Loss on the held-out rows", Html(held_out_curves(steps))))
        shown.append(figure("Peak of tensors", Html(peak_bars(peaks))))
    except MissingExtra as error:
        return element("p", f"No {error.what}: {error.hint}", class_="note")
    return element("div", *shown, class_="pair")


def _peak(run: RunFiles) -> Row:
    return next(row for row in compare(run.estimate, run.run, run.steps) if row.what == PEAK)


def _plan(method: MethodRun) -> Html:
    if method.run is None:
        return Html("")
    return details(
        f"{method.name}: {plan_words.headline(method.run.plan)}", items(plan_words.sentences(method.run.plan))
    )
