"""The estimate held against measured runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError, did_you_mean
from fitune.records.row import read_records
from fitune.records.score import GROUPS, Comparison, Errors, Score, compare_rows, group_score, scores_of
from fitune.units import format_bytes, format_percent, format_rate

_CONFIDENCE = {
    "high": ("high",), "medium": ("high", "medium"), "low": ("high", "medium", "low"),
    "any": ("high", "medium", "low", ""),
}  # fmt: skip
_TITLES = {
    "fitune": "fitune's own runs",
    "others": "other trainers, by their switches",
    "defaults": "trainers without switches, priced as though they were fitune",
}


def check_records(
    files: Sequence[Path], *, confidence: str, leave_one_out: bool, shows_rows: bool
) -> tuple[str, dict[str, Any]]:
    """Errors of the estimate by source and group: as text, with ``shows_rows`` those of every row, too, and as data.

    Raises DataError for a file that cannot be read and RecipeError for another confidence.
    """
    if confidence not in _CONFIDENCE:
        raise RecipeError(
            f"--confidence {confidence!r} is not a level",
            hint=did_you_mean(confidence, tuple(_CONFIDENCE)) or "high, medium, low or any",
        )
    rows = [row for file in files for row in read_records(file)]
    compared, skipped = compare_rows(rows, leave_one_out=leave_one_out)
    scores = [*scores_of(compared, confidence=_CONFIDENCE[confidence])]
    data: dict[str, Any] = {"rows": len(rows), "represented": len(compared), "leave_one_out": leave_one_out}
    levels = " or ".join(level or "unstated" for level in _CONFIDENCE[confidence])
    lines = [
        f"{len(compared)} of {len(rows)} rows map to a plan; errors are of rows with {levels} confidence"
    ]
    if leave_one_out:
        lines.append("each source is predicted without what was learnt from it")
    lines += ["", *(_rows_table(compared) if shows_rows else []), _HEADER]
    for group in GROUPS:
        own, of_all = [score for score in scores if score.group == group], group_score(scores, group)
        lines += [_TITLES[group], *(_line(score) for score in own)] if own else []
        lines += [_line(of_all)] if len(own) > 1 else []
        sources = {score.source: asdict(score) for score in own}
        data[group] = {"all": asdict(of_all), "sources": sources}  # errors are fractions, null without rows
    if skipped:
        lines += ["", "no plan:", *(f"  {row.id}: {why}" for row, why in skipped)]
    return "\n".join(lines), data | {"skipped": [{"id": row.id, "why": why} for row, why in skipped]}


_NAME = 40
_COLUMNS = f"{'n':>4} {'median':>7} {'p90':>7} {'bias':>7}"
_HEADER = (
    f"{'':<{_NAME}}        {'memory':^28}  {'speed':^28}  {'':>8} {'out of':>8}\n"
    f"  {'source':<{_NAME}} {'rows':>4} {_COLUMNS}  {_COLUMNS}  {'fits':>8} {'memory':>8}"
)


def _line(score: Score) -> str:
    name = (
        score.source if len(score.source) <= _NAME else f"{score.source[:16]}…{score.source[-(_NAME - 17) :]}"
    )
    fits = f"{score.ok_fit}/{score.ok}" if score.ok else "–"
    not_fit = f"{score.oom_not_fit}/{score.oom}" if score.oom else "–"
    return (
        f"  {name:<{_NAME}} {score.rows:>4} {_errors(score.memory)}  {_errors(score.speed)}"
        f"  {fits:>8} {not_fit:>8}"
    )


def _errors(errors: Errors) -> str:
    figures = (errors.median_abs_error, False), (errors.p90_abs_error, False), (errors.bias, True)
    columns = ("–" if value is None else format_percent(value, signed=signed) for value, signed in figures)
    return " ".join((f"{errors.count:>4}", *(f"{column:>7}" for column in columns)))


def _rows_table(compared: Sequence[Comparison]) -> list[str]:
    def shown(value: Any, write: Callable[[Any], str]) -> str:
        """The value as ``write`` says it; a dash for None."""
        return "–" if value is None else write(value)

    def size(value: float) -> str:
        """Bytes with their unit, as ``9.08 GiB``."""
        return format_bytes(round(value))

    def error(value: float) -> str:
        """A relative error in percent, as ``+0.8 %``."""
        return format_percent(value, signed=True)

    wide = max([2, *(len(one.row.id) for one in compared)])
    lines = [
        f"{'id':<{wide}} {'predicted':>12} {'measured':>12} {'error':>8}"
        f"  {'predicted':>16} {'measured':>16} {'error':>10}  trainer"
    ]
    for one in compared:
        verdict = "" if one.fits is None else ", fits" if one.fits else ", does not fit"
        lines.append(
            f"{one.row.id:<{wide}} {shown(one.predicted_bytes, size):>12} {shown(one.measured_bytes, size):>12}"
            f" {shown(one.memory_error, error):>8}  {shown(one.predicted_speed, format_rate):>16}"
            f" {shown(one.measured_speed, format_rate):>16} {shown(one.speed_error, error):>10}"
            f"  {one.trainer}, {'oom' if one.row.oom else 'ok'}{verdict}"
        )
    return [*lines, ""]
