"""comparison.html: two scorings of the same rows: the difference with its interval, the rows that changed both ways."""

from bisect import insort
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fitune.report.page import pictures_or_advice, render, write_page
from fitune.report.plots import Axes, colour, draw_svg
from fitune.report.score_rows import ScoredRow, places_of, read_score, read_scored_rows
from fitune.spec.reports import PairedScore, Scale, ScoreReport
from fitune.spec.words import describe_grade
from fitune.units import format_seconds

COMPARISON_PAGE = "comparison.html"
_SHOWN = 8
"""Rows of each direction."""
_SURE = 0.05
_NAME = 24
"""Characters of a grader's name beside its interval."""


def write_score_comparison(
    directory: Path, other: Path, paired: Sequence[PairedScore], changed: Iterable[dict[str, Any]]
) -> Path:
    """Write ``comparison.html`` into ``directory``. Raises RunDirectoryError when a folder's rows cannot be read."""
    mine, theirs = read_score(directory), read_score(other)
    first = next((found for found in paired if found.better + found.worse), paired[0])
    better, worse = _largest(changed, first.grader, sign=-1 if first.scale == "perplexity" else 1)
    wanted = {*better, *worse}
    here, there = _rows(directory, wanted, mine), _rows(other, wanted, theirs)

    def pairs(ids: Sequence[str]) -> list[tuple[ScoredRow, ScoredRow]]:
        """The rows with these ids, here and there; ids that one folder lacks are left out."""
        return [(here[id_], there[id_]) for id_ in ids if id_ in here and id_ in there]

    pictures, advice = pictures_or_advice(lambda: _pictures(paired), without=[])
    page = render(
        "comparison.html",
        title=f"{directory.name} and {other.name}: fitune score",
        names=(directory.name, other.name),
        verdicts=[_verdict(found) for found in paired],
        table_rows=[_cells(found) for found in paired],
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
    return write_page(directory / COMPARISON_PAGE, page)


def _largest(changed: Iterable[dict[str, Any]], grader: str, *, sign: int) -> tuple[list[str], list[str]]:
    """Ids of the rows that got better most, and of those that got worse most."""
    better: list[tuple[float, int, str]] = []
    worse: list[tuple[float, int, str]] = []
    for place, row in enumerate(changed):
        here, there = row["grades"].get(grader), row["other"].get(grader)
        if here is None or there is None or here == there:
            continue
        gain = sign * (here - there)
        kept = better if gain > 0 else worse
        if len(kept) < _SHOWN or -abs(gain) < kept[-1][0]:
            insort(kept, (-abs(gain), place, row["id"]))
            del kept[_SHOWN:]
    return [id_ for _, _, id_ in better], [id_ for _, _, id_ in worse]


def _rows(directory: Path, wanted: set[str], report: ScoreReport) -> dict[str, ScoredRow]:
    rows = read_scored_rows(directory, places_of(directory, wanted).values(), scales=report.scales)
    return {row["id"]: row for row in rows.values()}


def difference_text(value: float, scale: Scale) -> str:
    """``+4.0 points`` of a share in percent, else the signed number."""
    if scale == "share":
        return f"{100 * value:+.1f} points".replace("-", "−")
    return f"{value:+.4g}{' nats' if scale == 'nats' else ''}".replace("-", "−")


def _interval(found: PairedScore) -> str:
    """``−1.0 to +9.0 points``: both ends in one unit."""
    low, high = difference_text(found.low, found.scale), difference_text(found.high, found.scale)
    return f"{low.split()[0]} to {high}"


def _verdict(found: PairedScore) -> str:
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
        f"(95 %: {_interval(found)}{p}): {chance}."
    )


def _cells(found: PairedScore) -> Sequence[str]:
    return (
        found.grader,
        describe_grade(found.mean, found.scale),
        describe_grade(found.other, found.scale),
        difference_text(found.difference, found.scale),
        _interval(found),
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


def _pictures(paired: Sequence[PairedScore]) -> list[tuple[str, Any]]:
    """A picture for each scale that occurs: the differences with their intervals. Raises MissingExtra without
    matplotlib."""
    from markupsafe import Markup

    drawn = []
    for scale in dict.fromkeys(found.scale for found in paired):
        some = [found for found in paired if found.scale == scale]
        drawn.append(("Difference with its interval of 95 %", Markup(_intervals(some, scale))))
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
