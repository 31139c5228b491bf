"""A row as it was read, and the error that names one row."""

from dataclasses import dataclass
from typing import Any

from fitune.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source. ``where`` is ``file:line``, or ``file row n`` where lines mean nothing."""

    where: str
    fields: dict[str, Any]


class BadRow(DataError):
    """One row cannot be used. ``reason`` is the same for all rows with this fault: the ledger counts by it."""

    def __init__(self, message: str, *, reason: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason
