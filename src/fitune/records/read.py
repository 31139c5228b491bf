"""Records files: one JSON object a line, or one JSON document whose ``rows`` are such objects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fitune.errors import DataError
from fitune.files import read_text
from fitune.records.row import Row, row_from
from fitune.spec.serial import parse_json
from fitune.units import MIB

_MAX_BYTES = 64 * MIB


def read_records(path: Path) -> list[Row]:
    """Every row of ``path``, checked.

    A file of ours under ``results/`` is one document; its ``rows`` go through the same door. Raises DataError with
    file and line for what cannot be read, is no object, has an impossible size or repeats an id.
    """
    rows = [
        row_from(facts, line=line, where=str(path), fallback_source=path.name)
        for line, facts in _objects(path)
    ]
    if not rows:
        raise DataError(f"{path}: has no rows", hint="one JSON object a line; docs/records.md has the keys")
    seen: dict[str, int] = {}
    for row in rows:
        if row.id in seen:
            raise DataError(f"{path} line {row.line}: id {row.id!r} is that of line {seen[row.id]} too")
        seen[row.id] = row.line
    return rows


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    text = _text(path)
    document = _document(text)
    if document is not None:
        for number, facts in enumerate(document, start=1):
            yield number, _object(facts, f"{path} row {number}")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _object(_parsed(line, f"{path} line {number}"), f"{path} line {number}")


def _document(text: str) -> list[Any] | None:
    """The rows of a whole-file JSON document; None for JSON lines."""
    try:
        whole = parse_json(text)
    except ValueError:
        return None
    if isinstance(whole, dict) and isinstance(whole.get("rows"), list):
        rows: list[Any] = whole["rows"]
        return rows
    return whole if isinstance(whole, list) else None


def _text(path: Path) -> str:
    try:
        return read_text(path, limit=_MAX_BYTES, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parsed(line: str, where: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _object(facts: Any, where: str) -> dict[str, Any]:
    if not isinstance(facts, dict):
        raise DataError(f"{where}: expected an object, found {type(facts).__name__}")
    return facts
