"""The estimate held against measured runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError, did_you_mean
from fitune.records.compare import TRUSTED, Comparison
from fitune.records.read import read_records
from fitune.records.summary import Errors, SourceSummary, Summary, Verdicts, check_rows
from fitune.units import format_bytes, format_percent, format_rate

_CONFIDENCE = {"high": ("high",), "medium": TRUSTED, "low": (*TRUSTED, "low"), "any": (*TRUSTED, "low", "")}


def check_records(file: Path, *, confidence: str) -> Summary:
    """Raises DataError for a file that cannot be read and RecipeError for a confidence that is none."""
    if confidence not in _CONFIDENCE:
        raise RecipeError(
            f"--confidence {confidence} is none",
            hint=did_you_mean(confidence, tuple(_CONFIDENCE)) or "high, medium, low or any",
        )
    return check_rows(read_records(file), confidence=_CONFIDENCE[confidence])


def summary_data(summary: Summary) -> dict[str, Any]:
    """Errors and verdicts are fractions, null where there is nothing to compare."""
    return {
        "rows": summary.rows,
        "represented": summary.represented,
        "memory": asdict(summary.memory),
        "speed": asdict(summary.speed),
        "verdicts": _verdict_data(summary.verdicts),
        "per_source": {
            source.source: {
                "rows": source.rows,
                "represented": source.represented,
                "memory": asdict(source.memory),
                "speed": asdict(source.speed),
                "verdicts": _verdict_data(source.verdicts),
                "missing": source.missing,
            }
            for source in summary.per_source
        },
        "skipped": [{"id": skipped.row.id, "why": skipped.why} for skipped in summary.skipped],
    }


def _verdict_data(verdicts: Verdicts) -> dict[str, float | None]:
    return {"ok_fit": verdicts.ok_fit, "oom_not_fit": verdicts.oom_not_fit}


def summary_text(summary: Summary, *, rows: bool) -> str:
    lines = [
        f"{summary.represented} of {summary.rows} rows are runs that a plan can say; "
        f"errors are of rows with {_levels(summary.confidence)} confidence",
        "",
        *(_rows_table(summary.compared) if rows else []),
        f"{'':<{_NAME}}      {'memory':^28}  {'speed':^28}  {'':>8} {'out of':>8}",
        f"{'source':<{_NAME}} {'rows':>4} {_HEADER}  {_HEADER}  {'fits':>8} {'memory':>8}",
        *(_source_line(source) for source in summary.per_source),
        _line("all", summary.rows, summary.memory, summary.speed, summary.verdicts),
        "",
        *_sentences("memory", summary.memory),
        *_sentences("speed", summary.speed),
        *_missing_lines(summary),
        *_skipped_lines(summary),
    ]
    return "\n".join(lines)


_NAME = 40
_HEADER = f"{'n':>4} {'median':>7} {'p90':>7} {'bias':>7}"


def _levels(confidence: tuple[str, ...]) -> str:
    return " or ".join(level or "unstated" for level in confidence)


def _sentences(what: str, errors: Errors) -> list[str]:
    if errors.median_abs_error is None or errors.p90_abs_error is None or errors.bias is None:
        return []
    side = "much" if errors.bias > 0 else "little"
    return [
        f"{what}: half of {errors.count} rows are within {format_percent(errors.median_abs_error)}, nine in ten "
        f"within {format_percent(errors.p90_abs_error)}; {format_percent(abs(errors.bias))} too {side} on average"
    ]


def _source_line(source: SourceSummary) -> str:
    return _line(_shortened(source.source), source.rows, source.memory, source.speed, source.verdicts)


def _shortened(name: str) -> str:
    """Beginning and end: sources of one author differ at the end."""
    return name if len(name) <= _NAME else f"{name[:16]}…{name[-(_NAME - 17) :]}"


def _line(name: str, rows: int, memory: Errors, speed: Errors, verdicts: Verdicts) -> str:
    return (
        f"{name:<{_NAME}} {rows:>4} {_errors(memory)}  {_errors(speed)}"
        f"  {_share(verdicts.ok_fit, verdicts.ok):>8} {_share(verdicts.oom_not_fit, verdicts.oom):>8}"
    )


def _errors(errors: Errors) -> str:
    figures = (errors.median_abs_error, False), (errors.p90_abs_error, False), (errors.bias, True)
    columns = ("–" if value is None else format_percent(value, signed=signed) for value, signed in figures)
    return " ".join((f"{errors.count:>4}", *(f"{column:>7}" for column in columns)))


def _share(fraction: float | None, of: int) -> str:
    return "–" if fraction is None else f"{round(fraction * of)}/{of}"


def _missing_lines(summary: Summary) -> list[str]:
    known = [f"  {source.source}: {source.missing}" for source in summary.per_source if source.missing]
    return ["", "what the sources do not say:", *known] if known else []


def _skipped_lines(summary: Summary) -> list[str]:
    if not summary.skipped:
        return []
    return ["", "not represented:", *(f"  {skipped.row.id}: {skipped.why}" for skipped in summary.skipped)]


def _rows_table(compared: tuple[Comparison, ...]) -> list[str]:
    wide = max([2, *(len(one.row.id) for one in compared)])
    header = f"{'id':<{wide}} {'predicted':>12} {'measured':>12} {'error':>8}"
    header += f"  {'predicted':>16} {'measured':>16} {'error':>10}"
    return [header, *(_row_line(one, wide) for one in compared), ""]


def _row_line(one: Comparison, wide: int) -> str:
    verdict = "" if one.fits is None else "fits" if one.fits else "does not fit"
    return (
        f"{one.row.id:<{wide}} {format_bytes(one.predicted_bytes):>12} {_or_dash(one.measured_bytes, format_bytes):>12}"
        f" {_error(one.memory_error):>8}  {_or_dash(one.predicted_speed, format_rate):>16}"
        f" {_or_dash(one.measured_speed, format_rate):>16} {_error(one.speed_error):>10}  {one.row.outcome}, {verdict}"
    )


def _or_dash(value: Any, write: Any) -> str:
    return "–" if value is None else str(write(value))


def _error(value: float | None) -> str:
    return "–" if value is None else format_percent(value, signed=True)
