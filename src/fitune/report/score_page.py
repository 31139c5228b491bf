"""score.html: what was measured, how the grades are distributed, the worst rows, samples, and what it took."""

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from typing import Any

from fitune.errors import MissingExtra
from fitune.files import read_text
from fitune.report.html import render, write_page
from fitune.report.plots import Axes, colour, draw_svg
from fitune.report.score_rows import ScoredRow, read_score, read_scored_rows
from fitune.spec.reports import Scale, ScoreReport
from fitune.spec.words import describe_grade
from fitune.units import format_bytes, format_count, format_percent, format_seconds

SCORE_PAGE = "score.html"
_SHOWN = 8
"""Rows of each list."""
_BINS = 20


@dataclass(slots=True)
class _Seen:
    """All that the page needs of the rows, in one pass: 8 bytes a row and grader, and the rows that are shown."""

    graders: Sequence[str]
    worst_first: int
    """1 where low grades are bad, -1 where high ones are."""
    grades: dict[str, "array[float]"] = field(init=False)
    lengths: "array[float]" = field(default_factory=lambda: array("d"))
    worst: list[tuple[float, int, ScoredRow]] = field(default_factory=list)
    failed: list[ScoredRow] = field(default_factory=list)
    ungraded: list[ScoredRow] = field(default_factory=list)
    samples: list[ScoredRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grades = {name: array("d") for name in self.graders}

    def read(self, rows: Iterator[ScoredRow]) -> None:
        draw = random.Random(0)
        for place, row in enumerate(rows):
            self._add(row, place)
            if place < _SHOWN:
                self.samples.append(row)
            elif (at := draw.randrange(place + 1)) < _SHOWN:
                self.samples[at] = row

    def _add(self, row: ScoredRow, place: int) -> None:
        if row.completion_tokens:
            self.lengths.append(row.completion_tokens)
        if row.error:
            self.failed += [row] if len(self.failed) < _SHOWN else []
            return
        for name in self.graders:
            if (grade := row.grades[name]) is not None:
                self.grades[name].append(grade)
        if not self.graders:
            return
        grade = row.grades[self.graders[0]]
        if grade is None:
            self.ungraded += [row] if len(self.ungraded) < _SHOWN else []
        elif len(self.worst) < _SHOWN or self.worst_first * grade < self.worst[-1][0]:
            self.worst = nsmallest(_SHOWN, [*self.worst, (self.worst_first * grade, place, row)])


def write_score_page(directory: Path) -> Path:
    """Write ``score.html`` into the folder of a finished scoring. Raises RunDirectoryError."""
    report = read_score(directory)
    graders = tuple(report.grades)
    first: Scale = report.scales.get(graders[0], "share") if graders else "share"
    seen = _Seen(graders, -1 if first == "perplexity" else 1)
    seen.read(read_scored_rows(directory))
    pictures, advice = _pictures(report, seen)
    page = render(
        "score.html",
        title=f"{Path(report.model).name}: fitune score",
        name=Path(report.model).name,
        report=report,
        directory=directory.name,
        verdict=_verdict(report),
        tiles=list(_tiles(report)),
        measured=list(_measured(report)),
        pictures=pictures,
        advice=advice,
        first=graders[0] if graders else "",
        worst=[shown(row, report) for _, _, row in seen.worst],
        failed=[shown(row, report) for row in seen.failed],
        ungraded=[shown(row, report) for row in seen.ungraded],
        samples=[shown(row, report) for row in seen.samples],
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
    return f"{value}: {measures}, over {graded:,} rows{interval}."


@dataclass(frozen=True, slots=True)
class _Tile:
    name: str
    value: str
    below: str


def _tiles(report: ScoreReport) -> Iterator[_Tile]:
    failed = f"{report.failed:,} without an answer" if report.failed else "all answered"
    yield _Tile("Rows", f"{report.rows:,}", failed)
    if report.weighed_tokens:
        yield _Tile("Tokens weighed", format_count(report.weighed_tokens), "of given answers; none written")
    else:
        mean = report.generated_tokens / report.answered if report.answered else 0.0
        yield _Tile("Tokens written", format_count(report.generated_tokens), f"{mean:,.0f} in an answer")
        share = format_percent(report.cut_off / report.rows) if report.rows else "–"
        yield _Tile("Cut off", f"{report.cut_off:,}", f"{share} hit max_new_tokens")
    if report.prompt_tokens:
        yield _Tile("Prompt tokens", format_count(report.prompt_tokens), "read, never graded")
    if report.measured_bytes:
        error = format_percent(report.predicted_bytes / report.measured_bytes - 1, signed=True)
        below = f"{format_bytes(report.predicted_bytes)} predicted ({error}); first batch"
        yield _Tile("Peak of tensors", format_bytes(report.measured_bytes), below)
    rate = f"{report.rows_asked / report.seconds:,.1f} rows/s" if report.seconds else ""
    asked = rate if report.rows_asked == report.rows else f"last start, {report.rows_asked:,} rows asked"
    yield _Tile("Time", format_seconds(report.seconds), asked)


def _measured(report: ScoreReport) -> Iterator[Sequence[str]]:
    for name, mean in report.grades.items():
        yield (
            name,
            report.measures.get(name, ""),
            describe_grade(mean, report.scales.get(name, "share")),
            interval_text(report, name),
            f"{report.rows - report.ungraded.get(name, 0):,}",
            f"{report.grader_errors.get(name, 0):,}",
        )


def _pictures(report: ScoreReport, seen: _Seen) -> tuple[list[tuple[str, Any]], str]:
    """Titles and SVG elements; advice in their place without matplotlib."""
    from markupsafe import Markup

    drawn: list[tuple[str, Any]] = []
    try:
        for number, (name, grades) in enumerate(seen.grades.items()):
            if grades:
                axis = _axis(report.scales.get(name, "share"))
                drawn.append((f"Grades by {name}", Markup(histogram(grades, axis, name=f"grades-{number}"))))
        if seen.lengths:
            drawn.append(("Tokens of an answer", Markup(histogram(seen.lengths, "tokens", name="tokens"))))
    except MissingExtra as error:
        return [], f"No {error.what}: {error.hint}"
    return drawn, ""


def _axis(scale: Scale) -> str:
    return {"share": "grade", "value": "grade", "points": "points", "nats": "nats"}.get(scale, scale)


def histogram(values: Sequence[float], axis: str, *, name: str) -> str:
    """How many rows have which value; two bars where all are 0 or 1. Raises MissingExtra without matplotlib."""
    low, high = min(values), max(values)
    is_binary = all(value in (0.0, 1.0) for value in values)

    def draw(axes: Axes) -> None:
        if is_binary:
            right = sum(values)
            axes.bar([0, 1], [len(values) - right, right], width=0.6, color=colour("series-1"))
            axes.set_xticks([0, 1], ["0", "1"])
        else:
            span = (high - low) or 1.0
            axes.hist(values, bins=_BINS, range=(low, low + span), color=colour("series-1"), rwidth=0.9)
        axes.set_xlabel(axis)
        axes.set_ylabel("rows")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return draw_svg(draw, name=name, label=f"Rows by {axis}")


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
