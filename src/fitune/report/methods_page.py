"""compare.html: several ways of training the same data, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fitune.errors import MissingExtra
from fitune.report import plan_words
from fitune.report.compare import PEAK, Row, compare, row_texts
from fitune.report.method_findings import findings
from fitune.report.method_plots import held_out_curves, loss_curves, peak_bars, speed_bars
from fitune.report.page import page, write_page
from fitune.report.pieces import Content, Html, details, element, figure, items, join, section, table
from fitune.report.run_files import RunFiles
from fitune.units import format_number, format_percent

SPEED = "Throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRun:
    """One method: its run, or why there is none."""

    name: str
    run: RunFiles | None
    why_not: str = ""
    """Why it was not trained to its end, or not scored."""
    grades: Mapping[str, float] = field(default_factory=dict)


def write_comparison(
    directory: Path, methods: Sequence[MethodRun], *, base_grades: Mapping[str, float]
) -> Path:
    """Write ``compare.html`` into ``directory``. Raises RunDirectoryError."""
    return write_page(directory / "compare.html", render(methods, base_grades=base_grades))


def render(methods: Sequence[MethodRun], *, base_grades: Mapping[str, float]) -> str:
    runs = {method.name: method.run for method in methods if method.run is not None}
    first = next(iter(runs.values()), None)
    name = first.plan.model.name if first else "nothing was trained"
    body = join(
        [
            element(
                "header",
                element("p", "fitune compare", class_="eyebrow"),
                element("h1", name),
                element("p", "The same data, order and seed, trained in different ways.", class_="subtitle"),
            ),
            section("Side by side", _side_by_side(methods, base_grades), note=_SIDE_BY_SIDE),
            section("What that says", items(findings(runs))),
            section("Curves", _pictures(runs), note=_CURVES),
            section("The plans", *(_plan(method, run) for method, run in runs.items())),
            section("Not done", items(f"{m.name}: {m.why_not}" for m in methods if m.why_not)),
        ]
    )
    return page(f"{name}: fitune compare", body)


_SIDE_BY_SIDE = (
    "A learning rate of the recipe is scaled to each method as fitune's defaults differ: what suits adapters is far "
    "too much for all weights, and SGD's steps (lomo) are not normalised. Speed is of this machine, with whatever "
    "else it was doing."
)
_CURVES = (
    "Every method sees the same rows in the same order, so losses can be compared step by step. Solid: all weights are "
    "trained. Dashed: adapters."
)


def comparison_rows(
    methods: Sequence[MethodRun], base_grades: Mapping[str, float] | None = None
) -> list[tuple[str, ...]]:
    """The head, then one row of texts for the base when it was scored and for every trained method."""
    graders = _graders(methods, base_grades or {})
    base = (("base", "", "", "", *_grades(base_grades, graders), *[""] * 5),) if base_grades else ()
    trained = (_cells(m.name, m.run, m.grades, graders) for m in methods if m.run is not None)
    return [(*_HEAD, *(name.replace("_", " ") for name in graders), *_HEAD_MEASURED), *base, *trained]


_HEAD = ("", "learning rate", "loss, first → last", "held out, best")
_HEAD_MEASURED = ("peak predicted", "peak measured", "error", "tokens/s predicted", "tokens/s measured")


def _side_by_side(methods: Sequence[MethodRun], base_grades: Mapping[str, float]) -> Html:
    """The rows of the terminal, with each plan's headline below the method's name."""
    runs = {method.name: method.run for method in methods}
    head, *rows = comparison_rows(methods, base_grades)
    named: list[list[Content]] = [[_name(row[0], runs.get(row[0])), *row[1:]] for row in rows]
    return table(head, named, numbers=len(head) - 1, class_="cards")


def _name(name: str, run: RunFiles | None) -> Html:
    headline = "as it was" if run is None else plan_words.headline(run.plan)
    return join([name, element("span", headline)])


def _cells(name: str, run: RunFiles, grades: Mapping[str, float], graders: Sequence[str]) -> tuple[str, ...]:
    rows = {row.what: row for row in compare(run.estimate, run.run, run.steps)}
    _, predicted, measured, error = row_texts(rows[PEAK])
    report = run.run
    losses = (
        "" if report is None or not report.steps else f"{report.first_loss:.3f} → {report.final_loss:.3f}"
    )
    best = "" if report is None or report.best_eval_loss is None else format_number(report.best_eval_loss)
    return (
        name, f"{run.plan.schedule.learning_rate:g}", losses, best, *_grades(grades, graders), predicted, measured,
        error, _rate(rows[SPEED].predicted), _rate(rows[SPEED].measured),
    )  # fmt: skip


def _graders(methods: Sequence[MethodRun], base_grades: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*base_grades, *(name for method in methods for name in method.grades)]))


def _grades(grades: Mapping[str, float] | None, graders: Sequence[str]) -> tuple[str, ...]:
    return tuple(format_percent(grades[name]) if grades and name in grades else "" for name in graders)


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _pictures(runs: Mapping[str, RunFiles]) -> Html:
    """Losses, held-out losses, peaks and speeds; without matplotlib how to get them."""
    steps = {name: run.steps for name, run in runs.items() if run.steps}
    plans = {name: run.plan for name, run in runs.items()}
    if not steps:
        return Html("")
    try:
        shown = [figure("Training loss, running mean", Html(loss_curves(steps, plans)))]
        if any(step.eval_loss is not None for one in steps.values() for step in one):
            shown.append(figure("Loss on the held-out rows", Html(held_out_curves(steps, plans))))
        shown.append(figure("Peak of tensors", Html(peak_bars(_row_of(runs, PEAK)))))
        shown.append(figure("Speed", Html(speed_bars(_row_of(runs, SPEED)))))
    except MissingExtra as error:
        return element("p", f"No {error.what}: {error.hint}", class_="note")
    return element("div", *shown, class_="pair")


def _row_of(runs: Mapping[str, RunFiles], what: str) -> dict[str, Row]:
    return {
        name: next(row for row in compare(run.estimate, run.run, run.steps) if row.what == what)
        for name, run in runs.items()
    }


def _plan(name: str, run: RunFiles) -> Html:
    return details(f"{name}: {plan_words.headline(run.plan)}", items(plan_words.sentences(run.plan)))
