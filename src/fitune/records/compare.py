"""Predicted against measured, row by row."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fitune.records.beyond import counted_bytes, on_device_bytes
from fitune.records.hardware import device_bytes, device_is_named
from fitune.records.mapping import Case, case_of
from fitune.records.row import Row
from fitune.records.speed import tokens_per_second
from fitune.records.timeline import allocated_terms
from fitune.records.unrepresented import Unrepresented
from fitune.units import GIB

TRUSTED = ("high", "medium")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row: bytes and tokens per second of one device, and whether the run fits. None where nothing was measured."""

    row: Row
    predicted_bytes: int
    measured_bytes: int | None
    predicted_speed: float | None
    measured_speed: float | None
    fits: bool | None
    """Predicted; None when the row does not name its device."""
    missing: str
    """The fact that the row's source does not give."""

    @property
    def memory_error(self) -> float | None:
        """Of runs that went through: what a device shows at an out-of-memory error is no peak."""
        if self.measured_bytes is None or self.row.outcome == "oom":
            return None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def speed_error(self) -> float | None:
        if self.measured_speed is None or self.predicted_speed is None:
            return None
        return self.predicted_speed / self.measured_speed - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    row: Row
    why: str


def compare_rows(rows: Sequence[Row]) -> tuple[list[Comparison], list[Skipped]]:
    """Every row is either compared or skipped with the reason."""
    compared, skipped = [], []
    for row in rows:
        try:
            compared.append(_compared(case_of(row)))
        except Unrepresented as reason:
            skipped.append(Skipped(row=row, why=str(reason)))
    return compared, skipped


def _compared(case: Case) -> Comparison:
    row, phases = case.row, allocated_terms(case)
    named = device_is_named(row)
    return Comparison(
        row=row,
        predicted_bytes=counted_bytes(case, phases),
        measured_bytes=None if row.peak_mem_gib is None else round(row.peak_mem_gib * GIB),
        predicted_speed=tokens_per_second(case) if named else None,
        measured_speed=row.tok_s_per_gpu if named else None,
        fits=on_device_bytes(case, phases) <= device_bytes(row) if named else None,
        missing=case.habits.missing,
    )


def memory_errors(compared: Sequence[Comparison], *, confidence: Collection[str] = TRUSTED) -> list[float]:
    return [
        c.memory_error for c in compared if c.memory_error is not None and c.row.confidence_mem in confidence
    ]


def speed_errors(compared: Sequence[Comparison], *, confidence: Collection[str] = TRUSTED) -> list[float]:
    return [
        c.speed_error for c in compared if c.speed_error is not None and c.row.confidence_speed in confidence
    ]


def verdicts(
    compared: Sequence[Comparison], *, outcome: str, confidence: Collection[str] = TRUSTED
) -> list[bool]:
    """True if the estimate says the same as what happened. A run with a trusted speed did fit, too."""
    return [
        c.fits is (outcome == "ok")
        for c in compared
        if c.fits is not None
        and c.row.outcome == outcome
        and (c.row.confidence_mem in confidence or c.row.confidence_speed in confidence)
    ]
