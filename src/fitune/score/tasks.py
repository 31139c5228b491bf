"""Rows of a dataset to tasks: a prompt, what the answer should be, and an id that no other row has."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fitune.data.formats import Conversation, to_example
from fitune.data.rows import Row
from fitune.data.sources import read_rows
from fitune.data.templates import ChatTemplate
from fitune.errors import DataError
from fitune.spec.plan import DataSource

ID_COLUMNS = ("custom_id", "id")
"""Taken as the id when the first row has it; otherwise rows are numbered from 1."""

_SHOWN = 5
"""How many faulty rows an error lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to be answered."""

    id: str
    prompt_ids: tuple[int, ...]
    prompt_text: str
    expected: str
    where: str

    @property
    def fingerprint(self) -> str:
        """A hash of the prompt's token ids: an answer belongs to a prompt, not only to an id."""
        return hashlib.blake2b(repr(self.prompt_ids).encode(), digest_size=12).hexdigest()


def read_tasks(source: DataSource, *, template: ChatTemplate, id_column: str = "") -> list[Task]:
    """Every row of ``source`` as a task, in the order of the source.

    Raises DataError when ids are missing or appear twice, listing the first ones; when a row cannot be read;
    and when there is no row at all.
    """
    rows = list(read_rows(source))
    if not rows:
        raise DataError(f"{source.path}: no rows to answer")
    ids = row_ids(rows, id_column=id_column)
    conversations = (to_example(row, format=source.format, columns=source.columns) for row in rows)
    pairs = zip(ids, conversations, strict=True)
    return [to_task(_conversation(example, source), id=id_, template=template) for id_, example in pairs]


def to_task(conversation: Conversation, *, id: str, template: ChatTemplate) -> Task:
    """The last answer of the conversation is what is expected; everything before it is the prompt."""
    *prompt, answer = conversation.messages
    return Task(
        id=id,
        prompt_ids=tuple(template.encode_prompt(conversation)),
        prompt_text="\n".join(message.content for message in prompt),
        expected=answer.content,
        where=conversation.where,
    )


def row_ids(rows: list[Row], *, id_column: str = "") -> list[str]:
    """The id of each row as text: from ``id_column``, from the first of ID_COLUMNS, or the row's number.

    Raises DataError listing the first rows whose id is missing or was there before.
    """
    column = id_column or next((name for name in ID_COLUMNS if name in rows[0].fields), "")
    if not column:
        return [str(number) for number in range(1, len(rows) + 1)]
    ids = [_id_text(row.fields.get(column)) for row in rows]
    _refuse_missing(rows, ids, column)
    _refuse_duplicates(rows, ids, column)
    return [str(id_) for id_ in ids]


def _id_text(value: Any) -> str | None:
    """Texts and whole numbers are ids; anything else counts as missing."""
    if isinstance(value, str) and value.strip():
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _refuse_missing(rows: list[Row], ids: list[str | None], column: str) -> None:
    missing = [row.where for row, id_ in zip(rows, ids, strict=True) if id_ is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(rows)} rows have no id in column {column!r}: {_first(missing)}",
            hint="give every row a text or a whole number there, or name another column",
        )


def _refuse_duplicates(rows: list[Row], ids: list[str | None], column: str) -> None:
    first_with: dict[str | None, str] = {}
    again = []
    for row, id_ in zip(rows, ids, strict=True):
        if id_ in first_with:
            again.append(f"{id_!r} at {row.where}, already at {first_with[id_]}")
        first_with.setdefault(id_, row.where)
    if again:
        raise DataError(
            f"{len(again)} of {len(rows)} rows repeat an id of column {column!r}: {_first(again)}",
            hint="make the ids unique, or name another column; each id is answered exactly once",
        )


def _first(problems: Iterable[str]) -> str:
    problems = list(problems)
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _conversation(example: Any, source: DataSource) -> Conversation:
    if isinstance(example, Conversation):
        return example
    raise DataError(
        f"{example.where}: plain text has no question to answer and no answer to compare with",
        hint=f"name the columns of {source.path} that hold the prompt and the expected answer",
    )
