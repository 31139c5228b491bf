"""compare.html: several ways of training the same data, side by side; sentences that compare them are computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

from fitune.report import plan_words
from fitune.report.compare import PEAK, Figure, row_texts
from fitune.report.comparison_plots import held_out_curves, loss_curves, method_bars
from fitune.report.page import pictures_or_advice, render, write_page
from fitune.report.run_files import RunFiles
from fitune.units import format_bytes, format_number, format_percent, format_rate
from fitune.values.plan import Dense, base_of
from fitune.values.reports import settled_steps

SPEED = "Throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRun:
    """One method: its run, or why there is none."""

    name: str
    run: RunFiles | None
    why_not: str = ""
    """Why it was not trained to its end, or not scored."""
    grades: Mapping[str, float] = field(default_factory=dict)


def write_methods_page(
    directory: Path, methods: Sequence[MethodRun], *, base_grades: Mapping[str, float]
) -> Path:
    """Write ``compare.html`` into ``directory``. Raises RunDirectoryError."""
    from markupsafe import Markup

    runs = {method.name: method.run for method in methods if method.run is not None}
    first = next(iter(runs.values()), None)
    name = first.plan.model.name if first else "nothing was trained"
    pictures, advice = pictures_or_advice(lambda: _pictures(runs), without=[])
    head, *rows = comparison_rows(methods, base_grades)
    marks = best_of(runs)
    page = render(
        "compare.html",
        scripts=("hover.js",) if pictures else (),
        title=f"{name}: fitune compare",
        name=name,
        head=head,
        rows=[
            (
                Markup("{}<span>{}</span>").format(
                    row[0], " · ".join([*marks.get(row[0], ()), _headline(runs.get(row[0]))])
                ),
                *row[1:],
            )
            for row in rows
        ],
        findings=list(findings(runs)),
        pictures=pictures,
        advice=advice,
        plans=[
            (method, _headline(run), plan_words.sentences(run.plan, total=run.total_steps))
            for method, run in runs.items()
        ],
        not_done=[sentence(f"{method.name}: {method.why_not}") for method in methods if method.why_not],
    )
    return write_page(directory / "compare.html", page)


def sentence(text: str) -> str:
    """``text`` with a full stop, where it ends without one."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def best_of(runs: "Runs") -> dict[str, list[str]]:
    """Method -> what it is best at: the loss on held-out rows, speed, memory; of one run nothing."""
    if len(runs) < 2:
        return {}
    speeds = {} if _unsteady(runs) else _measured(runs, SPEED)
    found: dict[str, list[str]] = {}
    for what, values, best in (
        ("lowest held-out loss", _held_out(runs), min),
        ("fastest", speeds, max),
        ("least memory", _measured(runs, PEAK), min),
    ):
        first = [name for name, value in values.items() if value == best(values.values())]
        if len(values) > 1 and len(first) == 1:
            found.setdefault(first[0], []).append(what)
    return found


def _headline(run: RunFiles | None) -> str:
    return "as it was" if run is None else plan_words.headline(run.plan)


def comparison_rows(
    methods: Sequence[MethodRun], base_grades: Mapping[str, float] | None
) -> list[tuple[str, ...]]:
    """The head, then one row of texts for the base when it was scored and for every trained method."""
    graders = tuple(dict.fromkeys([*(base_grades or {}), *(name for m in methods for name in m.grades)]))
    base = (("base", "", "", "", *_grades(base_grades, graders), *[""] * 5),) if base_grades else ()
    trained = (_cells(m.name, m.run, m.grades, graders) for m in methods if m.run is not None)
    return [(*_HEAD, *(name.replace("_", " ") for name in graders), *_HEAD_MEASURED), *base, *trained]


_HEAD = ("", "learning rate", "loss, first → last", "held out, best")
_HEAD_MEASURED = ("peak predicted", "peak measured", "error", "tokens/s predicted", "tokens/s measured")


def _cells(name: str, run: RunFiles, grades: Mapping[str, float], graders: Sequence[str]) -> tuple[str, ...]:
    rows = _rows(run)
    speeds = (rows[SPEED].predicted, rows[SPEED].measured)
    report = run.run
    losses = best = ""
    if report is not None:
        losses = f"{report.first_loss:.3f} → {report.final_loss:.3f}" if report.steps else ""
        best = "" if report.best_eval_loss is None else format_number(report.best_eval_loss)
    return (
        name, f"{run.plan.schedule.learning_rate:g}", losses, best, *_grades(grades, graders),
        *row_texts(rows[PEAK])[1:], *("–" if value is None else f"{value:,.0f}" for value in speeds),
    )  # fmt: skip


def _grades(grades: Mapping[str, float], graders: Sequence[str]) -> tuple[str, ...]:
    return tuple(format_percent(grades[name]) if name in grades else "" for name in graders)


def _pictures(runs: Mapping[str, RunFiles]) -> list[tuple[str, str]]:
    """Losses, held-out losses, peaks and speeds. Raises MissingExtra without matplotlib."""
    steps = {name: run.steps for name, run in runs.items() if run.steps}
    plans = {name: run.plan for name, run in runs.items()}
    if not steps:
        return []
    drawn = [("Training loss, running mean", loss_curves(steps, plans))]
    if any(step.eval_loss is not None for one in steps.values() for step in one):
        drawn.append(("Loss on the held-out rows", held_out_curves(steps, plans)))
    drawn.append(
        (
            "Peak of tensors",
            method_bars(_row_of(runs, PEAK), name="peaks", label="Peak of tensors of every method"),
        )
    )
    drawn.append(("Speed", method_bars(_row_of(runs, SPEED), name="speeds", label="Speed of every method")))
    return drawn


def _row_of(runs: Mapping[str, RunFiles], what: str) -> dict[str, Figure]:
    return {name: _rows(run)[what] for name, run in runs.items()}


def _rows(run: RunFiles) -> dict[str, Figure]:
    return {row.what: row for row in run.comparison}


Runs = Mapping[str, RunFiles]
_LAST = 10
"""A final loss is the mean of a tenth of the steps: of one batch alone it says little."""
_SAME = 0.01
"""Losses that are nearer than this share are said to be equal."""
_UNSTEADY = 2.0
"""A run whose faster steps are so many times as fast as its slower ones was not alone on its machine."""


def findings(runs: Runs) -> Iterator[str]:
    """Sentences; fewer when there is less to compare."""
    if len(runs) < 2:
        return
    final = {name: final_loss(run) for name, run in runs.items() if run.steps}
    yield from _order("Training loss at the end", final)
    yield from _order("Best loss on the held-out rows", _held_out(runs))
    yield from _rounded_bases(runs)
    peaks = _measured(runs, PEAK)
    if len(peaks) > 1:
        least = min(peaks, key=peaks.__getitem__)
        yield _extremes("Least memory", least, peaks, lambda value: format_bytes(int(value)))
    yield from _speeds(runs)


def final_loss(run: RunFiles) -> float:
    """Mean over the last tenth of the steps."""
    last = run.steps[-max(1, len(run.steps) // _LAST) :]
    return sum(step.loss for step in last) / len(last)


def _held_out(runs: Runs) -> dict[str, float]:
    best = {name: run.run.best_eval_loss for name, run in runs.items() if run.run is not None}
    return {name: loss for name, loss in best.items() if loss is not None}


def _order(what: str, losses: Mapping[str, float]) -> Iterator[str]:
    """``…: full 0.0147 < lora 0.0192 = qlora 0.0193``, the best first."""
    if len(losses) < 2:
        return
    ranked = sorted(losses.items(), key=lambda entry: entry[1])
    words = [f"{ranked[0][0]} {format_number(ranked[0][1], digits=3)}"]
    for (_, before), (name, loss) in pairwise(ranked):
        words.append(f"{'≈' if loss <= before * (1 + _SAME) else '<'} {name} {format_number(loss, digits=3)}")
    yield f"{what}: {' '.join(words)}."


def _rounded_bases(runs: Runs) -> Iterator[str]:
    """The loss that packing the base costs before anything is trained, on the same first batch."""
    dense: list[str] = []
    packed: list[str] = []
    for name, run in runs.items():
        if run.steps:
            first = format_number(run.steps[0].loss)
            is_dense = isinstance(base_of(run.plan), Dense)
            (dense if is_dense else packed).append(first if is_dense else f"{name} {first}")
    if dense and packed:
        yield f"A packed base is another model from the first step on: {', '.join(packed)}, dense {dense[0]}."


def _measured(runs: Runs, what: str) -> dict[str, float]:
    return {name: row.measured for name, row in _row_of(runs, what).items() if row.measured}


def _speeds(runs: Runs) -> Iterator[str]:
    """Sentences on the fastest run, or that speeds cannot be compared because one run's own steps differ much."""
    if unsteady := _unsteady(runs):
        worst, slow, fast = unsteady
        yield (
            f"Speeds cannot be compared: the steps of {worst} alone went from {slow:,.0f} to {format_rate(fast)}, "
            "so this machine had other work."
        )
        return
    speeds = _measured(runs, SPEED)
    if len(speeds) > 1:
        yield _extremes("Fastest here", max(speeds, key=speeds.__getitem__), speeds, format_rate)


def _unsteady(runs: Runs) -> tuple[str, float, float] | None:
    """The run whose own steps differ most, with its slow and fast tokens a second, where they differ much."""
    spreads = {}  # tokens a second that a tenth of the settled steps were below, and above
    for name, run in runs.items():
        kind = None if run.run is None or run.run.memory is None else run.run.memory.kind
        speeds = [step.tokens_per_second for step in settled_steps(run.steps, kind=kind)]
        tenths = quantiles(speeds, n=10) if len(speeds) >= _LAST else [1.0]
        spreads[name] = tenths[0], tenths[-1]
    worst = max(spreads, key=lambda name: spreads[name][1] / spreads[name][0])
    slow, fast = spreads[worst]
    return (worst, slow, fast) if fast > _UNSTEADY * slow else None


def _extremes(what: str, best: str, values: Mapping[str, float], text: Callable[[float], str]) -> str:
    others = ", ".join(f"{name} {value / values[best]:.2f}" for name, value in values.items() if name != best)
    return f"{what}: {best}, {text(values[best])}; times that: {others}."
