"""score.html: what was measured, how the grades are distributed, the worst rows, samples, and what it took."""

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.files import read_text
from fitune.report.page import Tile, pictures_or_advice, render, write_page
from fitune.report.plots import Axes, colour, draw_svg
from fitune.report.score_rows import ScoredRow, read_columns, read_score, read_scored_rows
from fitune.spec.reports import Scale, ScoreReport
from fitune.spec.words import describe_grade
from fitune.units import counted, format_bytes, format_count, format_percent, format_seconds

SCORE_PAGE = "score.html"
_SHOWN = 8
"""Rows of each list."""
_BINS = 20


@dataclass(slots=True)
class Bars:
    """Number of rows with a value in each of _BINS parts of [low, high]; the last part holds ``high`` itself."""

    low: float = math.inf
    high: float = -math.inf
    is_binary: bool = True
    counts: Any = 0
    """An array once there is a value."""

    def widen(self, values: Any) -> None:
        """Widens the bounds to hold the values; called with all values first."""
        if len(values):
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
            self.is_binary = self.is_binary and bool(((values == 0) | (values == 1)).all())

    def count(self, values: Any) -> None:
        """Adds the values to their bins; called when ``widen`` has had all values."""
        import numpy as np

        if len(values):
            self.counts = self.counts + np.histogram(values, bins=_BINS, range=self.range)[0]

    @property
    def has_rows(self) -> bool:
        """True once ``widen`` has had a value."""
        return self.low <= self.high

    @property
    def range(self) -> tuple[float, float]:
        """The bounds of all bins; one apart where all values are equal."""
        return self.low, self.high if self.high > self.low else self.low + 1.0


@dataclass(slots=True)
class _Seen:
    """All that the page needs of the rows: counts, and the places of the rows that are shown."""

    graders: Sequence[str]
    worst_first: int
    """1 where low grades are bad, -1 where high ones are."""
    grades: dict[str, Bars] = field(init=False)
    lengths: Bars = field(default_factory=Bars)
    worst: list[tuple[float, int]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    ungraded: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grades = {name: Bars() for name in self.graders}

    def read(self, directory: Path) -> None:
        """Twice over the columns: a bar has its ends from all rows."""
        for _, lengths, grades in self._values(directory):
            self.lengths.widen(lengths)
            for name, values in grades.items():
                self.grades[name].widen(values[values == values])
        draw, first = random.Random(0), 0
        for failed, lengths, grades in self._values(directory):
            self.lengths.count(lengths)
            for name, values in grades.items():
                self.grades[name].count(values[values == values])
            self._choose(failed, grades, first)
            for place in range(first, first + len(failed)):
                if place < _SHOWN:
                    self.samples.append(place)
                elif (at := draw.randrange(place + 1)) < _SHOWN:
                    self.samples[at] = place
            first += len(failed)

    def _values(self, directory: Path) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        """For some rows at a time: which failed, the lengths of answers, and the grades, NaN where there is none."""
        import numpy as np

        columns = ["error", "completion_tokens", *(f"grade_{name}" for name in self.graders)]
        for batch in read_columns(directory, columns):
            failed = batch.column("error").is_valid().to_numpy(zero_copy_only=False)
            lengths = batch.column("completion_tokens").fill_null(0).to_numpy(zero_copy_only=False)
            grades = {
                name: np.where(
                    failed, np.nan, batch.column(f"grade_{name}").to_numpy(zero_copy_only=False).astype(float)
                )
                for name in self.graders
            }
            yield failed, lengths[lengths > 0], grades

    def _choose(self, failed: Any, grades: Mapping[str, Any], first: int) -> None:
        """Rows of each list: the first ones without an answer or a grade, and the worst by the first grader."""
        self.failed += [first + int(place) for place in failed.nonzero()[0][: _SHOWN - len(self.failed)]]
        if not self.graders:
            return
        values = self.worst_first * grades[self.graders[0]]
        missing = ((values != values) & ~failed).nonzero()[0]
        self.ungraded += [first + int(place) for place in missing[: _SHOWN - len(self.ungraded)]]
        lowest = values.argsort(kind="stable")[:_SHOWN]
        here = [
            (float(values[place]), first + int(place)) for place in lowest if values[place] == values[place]
        ]
        self.worst = sorted([*self.worst, *here])[:_SHOWN]

    @property
    def shown(self) -> set[int]:
        """Places of the rows on the page: the worst, without an answer, without a grade, and a sample."""
        worst = [place for _, place in self.worst]
        return {*worst, *self.failed, *self.ungraded, *self.samples}


def write_score_page(directory: Path) -> Path:
    """Write ``score.html`` into the folder of a finished scoring. Raises RunDirectoryError."""
    report = read_score(directory)
    graders = tuple(report.grades)
    first: Scale = report.scales.get(graders[0], "share") if graders else "share"
    seen = _Seen(graders, -1 if first == "perplexity" else 1)
    seen.read(directory)
    rows = read_scored_rows(directory, seen.shown)

    def listed(places: Iterable[int]) -> list[dict[str, Any]]:
        """The rows at these places, as the template takes them."""
        return [shown(rows[place], report) for place in places]

    pictures, advice = pictures_or_advice(lambda: _pictures(report, seen), without=[])
    page = render(
        "score.html",
        title=f"{report.model}: fitune score",
        report=report,
        directory=directory.name,
        verdict=_verdict(report),
        tiles=list(_tiles(report)),
        measured=list(_measured(report)),
        pictures=pictures,
        advice=advice,
        first=graders[0] if graders else "",
        worst=listed(place for _, place in seen.worst),
        failed=listed(seen.failed),
        ungraded=listed(seen.ungraded),
        samples=listed(seen.samples),
        settings=list(_settings(directory)),
    )
    return write_page(directory / SCORE_PAGE, page)


def shown(row: ScoredRow, report: ScoreReport) -> dict[str, Any]:
    """A row as the template takes it."""
    grades = [
        f"{name} {'not graded' if grade is None else describe_grade(grade, report.scales.get(name, 'share'))}"
        for name, grade in row.grades.items()
    ]
    if row.is_cut_off:
        grades.append("cut off at the token limit")
    return {
        "id": row.id, "prompt": row.prompt, "expected": row.expected, "answer": row.answer, "error": row.error,
        "grades": ", ".join(grades), "notes": list(row.notes.items()),
    }  # fmt: skip


def interval_text(report: ScoreReport, name: str) -> str:
    """The 95 % interval of a grader's mean, as ``41.0 % to 49.0 %``; ``–`` where there is none."""
    scale = report.scales.get(name, "share")
    low, high = report.intervals.get(name, (0.0, 0.0))
    return f"{describe_grade(low, scale)} to {describe_grade(high, scale)}" if high > low else "–"


def _verdict(report: ScoreReport) -> str:
    """The page's one sentence: the first grader's mean."""
    if not report.grades:
        return "The rows have no references and no grader was named, so the answers are not graded."
    name, mean = next(iter(report.grades.items()))
    measures = report.measures.get(name, name)
    graded = report.rows - report.ungraded.get(name, 0)
    value = describe_grade(mean, report.scales.get(name, "share"))
    low, high = report.intervals.get(name, (0.0, 0.0))
    interval = f" (95 %: {interval_text(report, name)})" if high > low else ", all of them alike"
    return f"{value}: {measures}, over {counted(graded, 'row')}{interval}."


def _tiles(report: ScoreReport) -> Iterator[Tile]:
    failed = f"{report.failed:,} without an answer" if report.failed else "all answered"
    yield Tile("Rows", f"{report.rows:,}", failed)
    if report.weighed_tokens:
        yield Tile("Tokens scored", format_count(report.weighed_tokens), "of given answers; none generated")
    else:
        mean = report.generated_tokens / report.answered if report.answered else 0.0
        yield Tile("Tokens written", format_count(report.generated_tokens), f"{mean:,.0f} in an answer")
        share = format_percent(report.cut_off / report.rows) if report.rows else "–"
        yield Tile("Cut off", f"{report.cut_off:,}", f"{share} hit max_new_tokens")
    if report.prompt_tokens:
        yield Tile("Prompt tokens", format_count(report.prompt_tokens), "read, never graded")
    if report.measured_bytes:
        error = format_percent(report.predicted_bytes / report.measured_bytes - 1, signed=True)
        below = f"{format_bytes(report.predicted_bytes)} predicted ({error}); first batch"
        yield Tile("Peak of tensors", format_bytes(report.measured_bytes), below)
    rate = f"{report.rows_asked / report.seconds:,.1f} rows/s" if report.seconds else ""
    asked = (
        rate if report.rows_asked == report.rows else f"last start, {counted(report.rows_asked, 'row')} asked"
    )
    yield Tile("Time", format_seconds(report.seconds), asked)


def _measured(report: ScoreReport) -> Iterator[Sequence[str]]:
    for name, mean in report.grades.items():
        yield (
            name, report.measures.get(name, ""), describe_grade(mean, report.scales.get(name, "share")),
            interval_text(report, name), f"{report.rows - report.ungraded.get(name, 0):,}",
            f"{report.grader_errors.get(name, 0):,}",
        )  # fmt: skip


def _pictures(report: ScoreReport, seen: _Seen) -> list[tuple[str, Any]]:
    """Titles and SVG elements. Raises MissingExtra without matplotlib."""
    from markupsafe import Markup

    drawn: list[tuple[str, Any]] = []
    for number, (name, grades) in enumerate(seen.grades.items()):
        if grades.has_rows:
            scale = report.scales.get(name, "share")
            axis = "grade" if scale in ("share", "value") else scale
            drawn.append((f"Grades by {name}", Markup(histogram(grades, axis, name=f"grades-{number}"))))
    if seen.lengths.has_rows:
        drawn.append(("Tokens of an answer", Markup(histogram(seen.lengths, "tokens", name="tokens"))))
    return drawn


def histogram(bars: Bars, axis: str, *, name: str) -> str:
    """Picture of the rows by value; two bars where all are 0 or 1. Raises MissingExtra without matplotlib."""
    import numpy as np

    def draw(axes: Axes) -> None:
        """Draws two bars, rows of 0 and of 1, or a histogram of _BINS bins."""
        if bars.is_binary:
            wrong, right = bars.counts[0], bars.counts[-1]
            if bars.high == bars.low:  # all are 0, or all are 1
                rows = int(bars.counts.sum())
                wrong, right = (0, rows) if bars.high else (rows, 0)
            axes.bar([0, 1], [wrong, right], width=0.6, color=colour("series-1"))
            axes.set_xticks([0, 1], ["0", "1"])
        else:
            edges = np.linspace(*bars.range, _BINS + 1)
            axes.hist(edges[:-1], bins=edges, weights=bars.counts, color=colour("series-1"), rwidth=0.9)
        axes.set_xlabel(axis)
        axes.set_ylabel("rows")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    digits = len(f"{int(bars.counts.max()):,}")
    return draw_svg(draw, name=name, label=f"Rows by {axis}", left_in=0.4 + 0.07 * digits)


def _settings(directory: Path) -> Iterator[tuple[str, str]]:
    """The manifest: what every answer depends on."""
    try:
        found = json.loads(read_text(directory / "manifest.json", follow_links=False))
    except (OSError, ValueError):
        return  # the page is worth reading without
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        yield name, str(value) or "–"
