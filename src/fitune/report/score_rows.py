"""Rows of a scoring read back: answers.parquet and grades.jsonl side by side, only those that a page shows."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, read_text
from fitune.values.reports import Scale, ScoreReport
from fitune.values.serial import from_json, parse_object
from fitune.values.words import describe_grade

ScoredRow = dict[str, Any]
"""One row as ``row_asked`` of ``templates/parts.html`` takes it: id, prompt, expected, answer, error, grades in words,
and notes, which are pairs of a grader and its error or the judge's words. ``answer`` is the model's, or the likeliest
of given ones, or None where only one text was given."""


def read_score(directory: Path) -> ScoreReport:
    """Raises RunDirectoryError when the folder has no report that can be read."""
    path = directory / "report.json"
    try:
        return from_json(ScoreReport, read_text(path, follow_links=False))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path}: cannot be read: {error}", hint="name the --out of a finished score"
        ) from None


def read_columns(directory: Path, columns: Sequence[str]) -> Any:
    """These columns of answers.parquet as a table of Arrow, in the order of the data. Raises RunDirectoryError."""
    import pyarrow.parquet as pq

    with _readable(directory), open_regular(directory / "answers.parquet", follow_links=False) as answers:
        return pq.read_table(answers, columns=list(columns))


def read_scored_rows(
    directory: Path, places: Collection[int], *, scales: Mapping[str, Scale]
) -> dict[int, ScoredRow]:
    """Place of a row in the data, from 0 -> the row, for each of ``places``. ``scales`` of the graders are those of the
    report. Raises RunDirectoryError."""
    import pyarrow.parquet as pq

    found: dict[int, ScoredRow] = {}
    left = sorted(set(places))
    with _readable(directory), ExitStack() as stack:
        answers = stack.enter_context(open_regular(directory / "answers.parquet", follow_links=False))
        grades = enumerate(stack.enter_context(open_regular(directory / "grades.jsonl", follow_links=False)))
        table, first = pq.ParquetFile(answers), 0
        for group in range(table.num_row_groups):
            after = first + table.metadata.row_group(group).num_rows
            if here := [place for place in left if first <= place < after]:
                rows = table.read_row_group(group)
            for place in here:
                line = next((line for number, line in grades if number == place), b"")
                (answered,) = rows.slice(place - first, 1).to_pylist()
                found[place] = _row(answered, parse_object(line), scales)
            first = after
    return found


def places_of(directory: Path, ids: Collection[str]) -> list[int]:
    """Places in the data, from 0, of the rows with these ids. Raises RunDirectoryError."""
    found = read_columns(directory, ["custom_id"])["custom_id"]
    return [place for place, id_ in enumerate(found.to_pylist()) if id_ in ids]


def first_failed(directory: Path) -> tuple[str, str]:
    """Id and first line of the error of the first row without an answer. Raises RunDirectoryError."""
    failed = read_columns(directory, ["custom_id", "error"]).drop_null()
    for row in failed.slice(0, 1).to_pylist():
        return row["custom_id"], row["error"].partition("\n")[0]
    raise RunDirectoryError(f"{directory}: every row has an answer", hint="score again")


def first_grader_error(directory: Path, grader: str) -> tuple[str, str]:
    """Id and first line of the error of the first row for which ``grader`` failed. Raises RunDirectoryError."""
    with _readable(directory), open_regular(directory / "grades.jsonl", follow_links=False) as file:
        for row in map(parse_object, file):
            if error := row.get("errors", {}).get(grader):
                return row["id"], error.partition("\n")[0]
    raise RunDirectoryError(f"{directory}: {grader} failed for no row", hint="score again")


def read_changed(directory: Path) -> Iterator[dict[str, Any]]:
    """Rows whose grade another scoring of the same rows has otherwise. Raises RunDirectoryError."""
    with _readable(directory), open_regular(directory / "changed.jsonl", follow_links=False) as file:
        yield from map(json.loads, file)


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise RunDirectoryError(
            f"{directory}: its rows cannot be read: {error}", hint="score again"
        ) from None


def _row(answered: dict[str, Any], graded: dict[str, Any], scales: Mapping[str, Scale]) -> ScoredRow:
    grades = [
        f"{name} {'not graded' if grade is None else describe_grade(grade, scales.get(name, 'share'))}"
        for name, grade in graded["grades"].items()
    ]
    if answered["finish_reason"] == "length":
        grades.append("cut off at the token limit")
    notes = {
        name: said if isinstance(said, str) else "\n\nin the other order:\n".join(said)
        for name, said in graded.get("said", {}).items()
    }
    notes |= {
        name: f"{error}\n{notes[name]}" if notes.get(name) else error
        for name, error in graded.get("errors", {}).items()
    }
    return {
        "id": answered["custom_id"], "prompt": answered["prompt"], "expected": answered["expected"],
        "answer": answered["answer"], "error": answered["error"] or "", "grades": ", ".join(grades),
        "notes": list(notes.items()),
    }  # fmt: skip
