"""compare.html: several ways of training the same data, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fitune.errors import MissingExtra
from fitune.report import plan_words
from fitune.report.compare import PEAK, Row, compare, row_texts
from fitune.report.html import render, write_page
from fitune.report.method_findings import findings
from fitune.report.method_plots import held_out_curves, loss_curves, peak_bars, speed_bars
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
    from markupsafe import Markup

    runs = {method.name: method.run for method in methods if method.run is not None}
    first = next(iter(runs.values()), None)
    name = first.plan.model.name if first else "nothing was trained"
    pictures, advice = _pictures_or_advice(runs)
    head, *rows = comparison_rows(methods, base_grades)
    page = render(
        "compare.html",
        title=f"{name}: fitune compare",
        name=name,
        head=head,
        rows=[
            (Markup("{}<span>{}</span>").format(row[0], _headline(runs.get(row[0]))), *row[1:])
            for row in rows
        ],
        findings=list(findings(runs)),
        pictures=[(title, Markup(picture)) for title, picture in pictures],
        advice=advice,
        plans=[(method, _headline(run), plan_words.sentences(run.plan)) for method, run in runs.items()],
        not_done=[f"{method.name}: {method.why_not}" for method in methods if method.why_not],
    )
    return write_page(directory / "compare.html", page)


def _headline(run: RunFiles | None) -> str:
    return "as it was" if run is None else plan_words.headline(run.plan)


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


def _pictures_or_advice(runs: Mapping[str, RunFiles]) -> tuple[list[tuple[str, str]], str]:
    """Losses, held-out losses, peaks and speeds; without matplotlib how to get them."""
    steps = {name: run.steps for name, run in runs.items() if run.steps}
    plans = {name: run.plan for name, run in runs.items()}
    if not steps:
        return [], ""
    try:
        drawn = [("Training loss, running mean", loss_curves(steps, plans))]
        if any(step.eval_loss is not None for one in steps.values() for step in one):
            drawn.append(("Loss on the held-out rows", held_out_curves(steps, plans)))
        drawn.append(("Peak of tensors", peak_bars(_row_of(runs, PEAK))))
        drawn.append(("Speed", speed_bars(_row_of(runs, SPEED))))
    except MissingExtra as error:
        return [], f"No {error.what}: {error.hint}"
    return drawn, ""


def _row_of(runs: Mapping[str, RunFiles], what: str) -> dict[str, Row]:
    return {
        name: next(row for row in compare(run.estimate, run.run, run.steps) if row.what == what)
        for name, run in runs.items()
    }
