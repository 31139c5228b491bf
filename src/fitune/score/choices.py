"""Rows with choices: a question, the texts to choose from, and which of them is right.

| layout         | fields                                                                                 |
|----------------|----------------------------------------------------------------------------------------|
| MMLU           | question, choices: [...], answer: 2, "C" or the text of a choice                       |
| ARC            | question, choices: {"label": [...], "text": [...]}, answerKey: "B" (CommonsenseQA too) |
| OpenBookQA     | question_stem in the place of question                                                 |
| HellaSwag      | ctx, endings: [...], label: 3                                                          |
| MedQA          | question, options: {"A": ..., "B": ...}, answer_idx: "B"; also options: [...]          |
| PIQA           | goal, sol1, sol2, label: 0                                                             |
| columns        | prompt, choices and completion (which one is right) named by the column mapping        |

A number counts from 0, a letter from A; labels that the row brings itself go before both.
"""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from fitune.data.conversations.formats import Columns
from fitune.data.reading.rows import BadRow, Row, in_row, require_characters
from fitune.data.reading.sources import read_rows
from fitune.spec.plan import DataSource

CHOICES_ROLE = "choices"
"""The column mapping's word for the column that holds the choices."""

_QUESTIONS = ("question", "question_stem", "ctx", "goal", "prompt", "query")
_LISTS = ("choices", "endings", "options")
_PAIRS = (("sol1", "sol2"),)
_KEYS = ("answerKey", "answer_idx", "answer", "label", "gold")
_MOST = len(string.ascii_uppercase)


def has_choices(row: Row, columns: Columns) -> bool:
    """True for a row in one of the layouts above."""
    return _fields(row, columns) is not None


def first_row_has_choices(sources: Sequence[DataSource]) -> bool:
    """True where the first row of all sources has choices: then they are weighed, and nothing is written."""
    first = next(iter(read_rows(sources[0])), None)
    return first is not None and has_choices(first, sources[0].columns)


def read_choices(row: Row, columns: Columns) -> tuple[str, str, tuple[str, ...], int]:
    """The row's question, its system message (empty without one), its choices, and the place of the right one, from 0.

    Raises BadRow naming field and value where it is unclear which is right.
    """
    fields = _fields(row, columns)
    if fields is None:
        raise BadRow(f"{row.where}: the row has no choices", reason="no choices")
    question, listed, key, system = fields
    with in_row(row.where):
        labels, choices = _choices(row, listed)
        asked, told = _text(row, question), _text(row, system) if system else ""
        return asked, told, choices, _right(row, key, labels, choices)


def _fields(row: Row, columns: Columns) -> tuple[str, tuple[str, ...], str, str] | None:
    """Names of the row's fields: of the question, the choices, the right one, and the system message or none."""
    mapping = dict(columns)
    if mapping:
        if CHOICES_ROLE not in mapping or not {"prompt", "completion"} <= mapping.keys():
            return None
        return mapping["prompt"], (mapping[CHOICES_ROLE],), mapping["completion"], mapping.get("system", "")
    names = row.fields
    question = next((name for name in _QUESTIONS if name in names), "")
    key = next((name for name in _KEYS if names.get(name) is not None), "")
    listed = next((name for name in _LISTS if isinstance(names.get(name), list | dict)), "")
    pair = next((pair for pair in _PAIRS if all(name in names for name in pair)), ())
    if not question or not key or not (listed or pair):
        return None
    return question, (listed,) if listed else pair, key, ""


def _choices(row: Row, fields: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels, empty where the row brings none, and texts."""
    found = row.fields.get(fields[0]) if len(fields) == 1 else [row.fields[name] for name in fields]
    labels: Sequence[Any] = ()
    if isinstance(found, Mapping):
        if {"label", "text"} <= found.keys():
            labels, found = found["label"], found["text"]
        else:
            labels, found = list(found), list(found.values())
    where = " and ".join(fields)
    if not isinstance(found, list) or not all(isinstance(text, str) and text.strip() for text in found):
        raise BadRow(f"{where}: {found!r:.80} is not a list of texts", reason="wrong type")
    if not 2 <= len(found) <= _MOST:
        raise BadRow(
            f"{where}: {len(found)} choices, there must be 2 to {_MOST}", reason="wrong number of choices"
        )
    if labels and (
        not isinstance(labels, list) or len(labels) != len(found) or len(set(map(str, labels))) != len(found)
    ):
        raise BadRow(
            f"{where}: labels {labels!r:.80} do not name {len(found)} choices", reason="wrong labels"
        )
    for text in found:
        require_characters(fields[0], text, hint="write it as UTF-8")
    return tuple(str(label).strip() for label in labels), tuple(found)


def _right(row: Row, field: str, labels: Sequence[str], choices: Sequence[str]) -> int:
    """The place that ``field`` means. A text that is a choice and a number of another one is refused."""
    value = row.fields.get(field)

    def unclear(fault: str) -> BadRow:
        """The error for a value with this fault, which tells the values that are known."""
        last = len(choices) - 1
        known = ", ".join(labels) or f"0 to {last}, A to {string.ascii_uppercase[last]}"
        return BadRow(
            f"{field} = {value!r:.40} {fault}; known are {known} and the texts of the choices",
            reason="right choice unclear",
        )

    if isinstance(value, bool) or not isinstance(value, int | str):
        raise unclear("names no choice")
    said = str(value).strip()
    if said in labels:
        return list(labels).index(said)
    meant = set()
    if said.isascii() and said.isdecimal() and int(said) < len(choices) and not labels:
        meant.add(int(said))
    if isinstance(value, str):
        letter = string.ascii_uppercase.find(said.upper()) if len(said) == 1 else -1
        if 0 <= letter < len(choices) and not labels:
            meant.add(letter)
        meant |= {place for place, text in enumerate(choices) if text.strip() == said}
    if len(meant) != 1:
        raise unclear("may be one choice or another" if meant else "names no choice")
    return meant.pop()


def _text(row: Row, field: str) -> str:
    value = row.fields.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{field} = {value!r:.40} is not a text", reason="wrong type")
    require_characters(field, value, hint="write it as UTF-8")
    return value
