"""score.html: what was measured, how the grades are distributed, the worst rows, samples, and what it took; and
comparison.html of two scorings of the same rows: the difference with its interval, the rows that changed both ways."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.report.page import Tile, pictures_or_advice, render, write_page
from fitune.report.plots import Axes, colour, draw_svg
from fitune.report.score_rows import ScoredRow, places_of, read_columns, read_score, read_scored_rows
from fitune.units import counted, format_bytes, format_count, format_percent, format_seconds
from fitune.values.reports import PairedScore, Scale, ScoreReport
from fitune.values.serial import read_object
from fitune.values.words import describe_grade, describe_interval, describe_mean

_SHOWN = 8
"""Rows of each list."""
_BINS = 20
_SURE = 0.05
_NAME = 24
"""Characters of a grader's name beside its interval."""


def write_score_page(directory: Path) -> Path:
    """Write ``score.html`` into the folder of a finished scoring. Raises RunDirectoryError."""
    report = read_score(directory)
    graders = tuple(report.grades)
    failed, lengths, grades = _read(directory, graders)
    low_is_bad = [
        -grades[name] if report.scales.get(name) == "perplexity" else grades[name] for name in graders[:1]
    ]
    places = _places(failed, low_is_bad)
    wanted = {place for some in places.values() for place in some}
    rows = read_scored_rows(directory, wanted, scales=report.scales)
    lists: dict[str, Any] = {name: [rows[place] for place in some] for name, some in places.items()}
    pictures, advice = pictures_or_advice(lambda: _score_pictures(report, lengths, grades), without=[])
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
        **lists,
        settings=list(_settings(directory)),
    )
    return write_page(directory / "score.html", page)


def _read(directory: Path, graders: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Arrays over the rows: which failed; tokens of the answers; by grader the grades, NaN where there is none."""
    import numpy as np

    table = read_columns(directory, ["error", "completion_tokens", *(f"grade_{name}" for name in graders)])
    failed, lengths = table["error"].is_valid().to_numpy(), table["completion_tokens"].fill_null(0).to_numpy()
    grades = (table[f"grade_{name}"].to_numpy().astype(float) for name in graders)
    graded = {name: np.where(failed, np.nan, values) for name, values in zip(graders, grades, strict=True)}
    return failed, lengths[lengths > 0], graded


def _places(failed: Any, first: Sequence[Any]) -> dict[str, list[int]]:
    """Places of the rows of each list: the worst by the ``first`` grader, without an answer or a grade, a sample."""
    found = {"worst": [], "failed": failed.nonzero()[0][:_SHOWN].tolist(), "ungraded": []}
    for values in first:
        missing = values != values
        found["worst"] = [
            place for place in values.argsort(kind="stable")[:_SHOWN].tolist() if not missing[place]
        ]
        found["ungraded"] = (missing & ~failed).nonzero()[0][:_SHOWN].tolist()
    samples = random.Random(0).sample(range(len(failed)), min(_SHOWN, len(failed)))
    return {**found, "samples": samples}


def _verdict(report: ScoreReport) -> str:
    """The page's one sentence: the first grader's mean."""
    if not report.grades:
        return "The rows have no references and no grader was named, so the answers are not graded."
    name = next(iter(report.grades))
    graded = report.rows - report.ungraded.get(name, 0)
    if not graded:
        return f"{name} graded no row."
    ends = describe_interval(report, name)
    interval = f" (95 %: {ends})" if ends else ", all of them alike"
    measures = report.measures.get(name, name)
    return f"{describe_mean(report, name)}: {measures}, over {counted(graded, 'row')}{interval}."


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
    for name in report.grades:
        yield (
            name, report.measures.get(name, ""), describe_mean(report, name),
            describe_interval(report, name) or "–", f"{report.rows - report.ungraded.get(name, 0):,}",
            f"{report.grader_errors.get(name, 0):,}",
        )  # fmt: skip


def _score_pictures(report: ScoreReport, lengths: Any, grades: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Titles and SVG elements. Raises MissingExtra without matplotlib."""
    drawn: list[tuple[str, Any]] = []
    for number, (name, values) in enumerate(grades.items()):
        graded = values[values == values]
        if len(graded):
            scale = report.scales.get(name, "share")
            axis = "grade" if scale in ("share", "value") else scale
            drawn.append((f"Grades by {name}", histogram(graded, axis, name=f"grades-{number}")))
    if len(lengths):
        drawn.append(("Tokens of an answer", histogram(lengths, "tokens", name="tokens")))
    return drawn


def histogram(values: Any, axis: str, *, name: str) -> str:
    """Picture of the rows by value; two bars where all are 0 or 1. Raises MissingExtra without matplotlib."""
    import numpy as np

    low, high = float(values.min()), float(values.max())
    counts, edges = np.histogram(values, bins=_BINS, range=(low, high if high > low else low + 1.0))
    is_binary = bool(((values == 0) | (values == 1)).all())

    def draw(axes: Axes) -> None:
        """Draws two bars, rows of 0 and of 1, or a histogram of _BINS bins."""
        if is_binary:
            right = int(values.sum())
            axes.bar([0, 1], [len(values) - right, right], width=0.6, color=colour("series-1"))
            axes.set_xticks([0, 1], ["0", "1"])
        else:
            axes.hist(edges[:-1], bins=edges, weights=counts, color=colour("series-1"), rwidth=0.9)
        axes.set_xlabel(axis)
        axes.set_ylabel("rows")
        axes.yaxis.get_major_locator().set_params(integer=True)  # of few rows, else, 0.5 is a second "0"
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

    return draw_svg(draw, name=name, label=f"Rows by {axis}")


def _settings(directory: Path) -> Iterator[tuple[str, str]]:
    """The manifest: what every answer depends on."""
    try:
        found = read_object(directory / "manifest.json", follow_links=False)
    except (OSError, ValueError):
        return  # the page is worth reading without
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        yield name, str(value) or "–"


def write_score_comparison(
    directory: Path, other: Path, paired: Sequence[PairedScore], changed: Iterable[dict[str, Any]]
) -> Path:
    """Write ``comparison.html`` into ``directory``. Raises RunDirectoryError when a folder's rows cannot be read."""
    mine, theirs = read_score(directory), read_score(other)
    first = next((found for found in paired if found.better + found.worse), paired[0])
    better, worse = _largest(changed, first.grader, sign=-1 if first.scale == "perplexity" else 1)
    wanted = {*better, *worse}
    here, there = _changed_rows(directory, wanted, mine), _changed_rows(other, wanted, theirs)

    def pairs(ids: Sequence[str]) -> list[tuple[ScoredRow, ScoredRow]]:
        """The rows with these ids, here and there; ids that one folder lacks are left out."""
        return [(here[id_], there[id_]) for id_ in ids if id_ in here and id_ in there]

    pictures, advice = pictures_or_advice(lambda: _difference_pictures(paired), without=[])
    page = render(
        "comparison.html",
        title=f"{directory.name} and {other.name}: fitune score",
        names=(directory.name, other.name),
        verdicts=[comparison_verdict(found) for found in paired],
        table_rows=[_comparison_cells(found) for found in paired],
        counts=[_counts(found) for found in paired if found.p_value is not None],
        pictures=pictures,
        advice=advice,
        first=first.grader,
        changed=[
            ("Better here", first.better, pairs(better)),
            ("Worse here", first.worse, pairs(worse)),
        ],
        unchanged=first.rows - first.better - first.worse,
        runs=[
            (what, here_, there_)
            for (what, here_), there_ in zip(_facts(mine).items(), _facts(theirs).values(), strict=True)
        ],
        file="changed.jsonl",
    )
    return write_page(directory / "comparison.html", page)


def _largest(changed: Iterable[dict[str, Any]], grader: str, *, sign: int) -> tuple[list[str], list[str]]:
    """Ids of the rows that got better most, and of those that got worse most."""
    gains = []
    for row in changed:
        here, there = row["grades"].get(grader), row["other"].get(grader)
        if here is not None and there is not None:
            gains.append((sign * (here - there), row["id"]))
    gains.sort(key=lambda gain: -abs(gain[0]))
    better = [id_ for gain, id_ in gains if gain > 0]
    worse = [id_ for gain, id_ in gains if gain < 0]
    return better[:_SHOWN], worse[:_SHOWN]


def _changed_rows(directory: Path, wanted: set[str], report: ScoreReport) -> dict[str, ScoredRow]:
    rows = read_scored_rows(directory, places_of(directory, wanted), scales=report.scales)
    return {row["id"]: row for row in rows.values()}


def difference_text(value: float, scale: Scale) -> str:
    """``+4.0 points`` of a share in percent, else the signed number."""
    if scale == "share":
        return f"{100 * value:+.1f} points".replace("-", "−")
    return f"{value:+.4g}{' nats' if scale == 'nats' else ''}".replace("-", "−")


def _difference_interval(found: PairedScore) -> str:
    """``−1.0 to +9.0 points``: both ends in one unit."""
    low, high = difference_text(found.low, found.scale), difference_text(found.high, found.scale)
    return f"{low.split()[0]} to {high}"


def comparison_verdict(found: PairedScore) -> str:
    """One sentence a grader: the difference, and if it may be chance."""
    if not found.better + found.worse:
        return f"{found.grader}: {describe_grade(found.mean, found.scale)} in both: no row changed."
    is_sure = found.low > 0 or found.high < 0
    if found.p_value is not None:
        is_sure = found.p_value < _SURE
    chance = "more than chance" if is_sure else "may be chance"
    lower = " (lower is better)" if found.scale == "perplexity" else ""
    p = "" if found.p_value is None else f", McNemar p = {found.p_value:.3g}"
    return (
        f"{found.grader}: {describe_grade(found.mean, found.scale)} here, "
        f"{describe_grade(found.other, found.scale)} there{lower}: {difference_text(found.difference, found.scale)} "
        f"(95 %: {_difference_interval(found)}{p}): {chance}."
    )


def _comparison_cells(found: PairedScore) -> Sequence[str]:
    return (
        found.grader,
        describe_grade(found.mean, found.scale),
        describe_grade(found.other, found.scale),
        difference_text(found.difference, found.scale),
        _difference_interval(found),
        "–" if found.p_value is None else f"{found.p_value:.3g}",
        f"{found.better:,}",
        f"{found.worse:,}",
        f"{found.rows:,}",
    )


def _counts(found: PairedScore) -> Sequence[str]:
    """Rows right in both, only here, only there, in neither."""
    both = round(found.mean * found.rows) - found.better
    counts = (both, found.better, found.worse, found.rows - both - found.better - found.worse)
    return (found.grader, *(f"{count:,}" for count in counts))


def _facts(report: ScoreReport) -> dict[str, str]:
    return {
        "model": report.model, "adapter": report.adapter or "–", "data": report.data, "rows": f"{report.rows:,}",
        "without an answer": f"{report.failed:,}", "tokens written": f"{report.generated_tokens:,}",
        "cut off at the token limit": f"{report.cut_off:,}", "time of the last start": format_seconds(report.seconds),
    }  # fmt: skip


def _difference_pictures(paired: Sequence[PairedScore]) -> list[tuple[str, Any]]:
    """A picture for each scale that occurs: the differences with their intervals. Raises MissingExtra without
    matplotlib."""
    drawn = []
    for scale in dict.fromkeys(found.scale for found in paired):
        some = [found for found in paired if found.scale == scale]
        drawn.append(("Difference with its interval of 95 %", _intervals(some, scale)))
    return drawn


def _intervals(some: Sequence[PairedScore], scale: Scale) -> str:
    factor = 100.0 if scale == "share" else 1.0

    def draw(axes: Axes) -> None:
        """Draws each grader's difference as a point on its 95 % interval, and a line at 0."""
        for place, found in enumerate(some):
            axes.plot(
                [factor * found.low, factor * found.high], [place, place], color=colour("series-1"), linewidth=5,
                alpha=0.4, solid_capstyle="butt",
            )  # fmt: skip
            axes.plot([factor * found.difference], [place], color=colour("series-1"), marker="o")
        axes.axvline(0, color=colour("ink"), linewidth=1)
        names = [found.grader for found in some]  # a pattern or a judge's file may be long
        short = [name if len(name) <= _NAME else f"{name[: _NAME - 1]}…" for name in names]
        axes.set_yticks(range(len(some)), short, parse_math=False)
        axes.tick_params(axis="y", labelcolor=colour("ink"))
        axes.set_ylim(len(some) - 0.5, -0.5)
        axes.set_xlabel({"share": "percentage points", "perplexity": "perplexity"}.get(scale, scale))

    return draw_svg(
        draw,
        name=f"difference-{scale}",
        label=f"Differences in {scale}",
        grid="x",
        height_in=0.8 + 0.4 * len(some),
    )
