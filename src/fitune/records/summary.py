"""Errors in few numbers: how far off, to which side, and whether what was said to fit does."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from fitune.records.compare import (
    TRUSTED,
    Comparison,
    Skipped,
    compare_rows,
    memory_errors,
    speed_errors,
    verdicts,
)
from fitune.records.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Fractions; None when there is nothing to compare."""

    count: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    """Mean of predicted / measured − 1: above zero means more was predicted than measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Fractions of the runs that went through and were said to, and of those that did not and were said not to."""

    ok: int
    ok_fit: float | None
    oom: int
    oom_not_fit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSummary:
    source: str
    rows: int
    represented: int
    memory: Errors
    speed: Errors
    verdicts: Verdicts
    missing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    rows: int
    confidence: tuple[str, ...]
    memory: Errors
    speed: Errors
    verdicts: Verdicts
    per_source: tuple[SourceSummary, ...]
    compared: tuple[Comparison, ...]
    skipped: tuple[Skipped, ...]

    @property
    def represented(self) -> int:
        return len(self.compared)


def check_rows(rows: Sequence[Row], *, confidence: Collection[str] = TRUSTED) -> Summary:
    """All rows are turned into plans; only those of the wanted confidence count as evidence."""
    compared, skipped = compare_rows(rows)
    sources = dict.fromkeys(row.source for row in rows)
    return Summary(
        rows=len(rows),
        confidence=tuple(confidence),
        memory=errors_of(memory_errors(compared, confidence=confidence)),
        speed=errors_of(speed_errors(compared, confidence=confidence)),
        verdicts=_verdicts(compared, confidence),
        per_source=tuple(_source_summary(source, rows, compared, confidence) for source in sources),
        compared=tuple(compared),
        skipped=tuple(skipped),
    )


def errors_of(errors: Sequence[float]) -> Errors:
    if not errors:
        return Errors(count=0, median_abs_error=None, p90_abs_error=None, bias=None)
    sizes = sorted(abs(error) for error in errors)
    return Errors(
        count=len(sizes),
        median_abs_error=median(sizes),
        p90_abs_error=percentile(sizes, 0.9),
        bias=fmean(errors),
    )


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """Between the two values beside rank fraction · (n − 1), in proportion."""
    rank = fraction * (len(ascending) - 1)
    below = int(rank)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (rank - below) * (ascending[above] - ascending[below])


def _source_summary(
    source: str, rows: Sequence[Row], compared: Sequence[Comparison], confidence: Collection[str]
) -> SourceSummary:
    own = [c for c in compared if c.row.source == source]
    return SourceSummary(
        source=source,
        rows=sum(row.source == source for row in rows),
        represented=len(own),
        memory=errors_of(memory_errors(own, confidence=confidence)),
        speed=errors_of(speed_errors(own, confidence=confidence)),
        verdicts=_verdicts(own, confidence),
        missing="; ".join(dict.fromkeys(c.missing for c in own if c.missing)),
    )


def _verdicts(compared: Sequence[Comparison], confidence: Collection[str]) -> Verdicts:
    ok = verdicts(compared, outcome="ok", confidence=confidence)
    oom = verdicts(compared, outcome="oom", confidence=confidence)
    return Verdicts(
        ok=len(ok),
        ok_fit=fmean(ok) if ok else None,
        oom=len(oom),
        oom_not_fit=fmean(oom) if oom else None,
    )
