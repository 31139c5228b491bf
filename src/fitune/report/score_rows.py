"""Rows of a scoring read back: answers.parquet and grades.jsonl side by side, one row at a time."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, read_text
from fitune.spec.reports import ScoreReport
from fitune.spec.serial import from_json

_TOGETHER = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One row; ``answer`` is the model's, or the likeliest of given ones, or None where only one text was weighed."""

    id: str
    prompt: str
    expected: str | None
    answer: str | None
    error: str
    completion_tokens: int
    is_cut_off: bool
    grades: dict[str, float | None]
    notes: dict[str, str] = field(default_factory=dict)
    """Grader -> its error, or the judge's words."""


def read_score(directory: Path) -> ScoreReport:
    """Raises RunDirectoryError when the folder has no report that can be read."""
    path = directory / "report.json"
    try:
        return from_json(ScoreReport, read_text(path, follow_links=False))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path}: cannot be read: {error}", hint="name the --out of a finished score"
        ) from None


def read_scored_rows(directory: Path) -> Iterator[ScoredRow]:
    """In the order of the data. Raises RunDirectoryError."""
    import pyarrow.parquet as pq

    path = directory / "answers.parquet"
    try:
        with ExitStack() as stack:
            answers = stack.enter_context(open_regular(path, follow_links=False))
            grades = stack.enter_context(open_regular(directory / "grades.jsonl", follow_links=False))
            table = pq.ParquetFile(answers)
            for batch in table.iter_batches(batch_size=_TOGETHER):
                for answered in batch.to_pylist():
                    yield _row(answered, json.loads(grades.readline()))
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"{directory}: its rows cannot be read: {error}", hint="score again"
        ) from None


def _row(answered: dict[str, Any], graded: dict[str, Any]) -> ScoredRow:
    notes = {name: _words(said) for name, said in graded.get("said", {}).items()}
    notes |= {
        name: f"{error}\n{notes[name]}" if notes.get(name) else error
        for name, error in graded.get("errors", {}).items()
    }
    return ScoredRow(
        id=answered["custom_id"],
        prompt=answered["prompt"],
        expected=answered["expected"],
        answer=answered["answer"],
        error=answered["error"] or "",
        completion_tokens=answered["completion_tokens"] or 0,
        is_cut_off=answered["finish_reason"] == "length",
        grades=graded["grades"],
        notes=notes,
    )


def _words(said: str | list[str]) -> str:
    return said if isinstance(said, str) else "\n\nin the other order:\n".join(said)
