"""A row as it was read, the error that names one row, and what fitune refuses to learn from.

Refused by name are fields that change what should be learned (images, weights of messages): to pass over
them in silence would train something else than the data says. And preference data: fitune learns every answer it
reads, so it would learn the bad ones too:

| kind               | told by                                                                                    |
|--------------------|--------------------------------------------------------------------------------------------|
| pairs (DPO, ORPO)  | chosen and rejected                                                                        |
| KTO                | label true or false beside an answer (0 or 1 beside prompt and completion), or kto_tag     |
| stepwise (PRM)     | labels, a list of true and false, or completions and labels                                |

A ``label`` that is a class of plain text, or any other value, says nothing about an answer and is left alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fitune.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source. ``where`` is ``file:line``, or ``file row n`` where lines mean nothing."""

    where: str
    fields: dict[str, Any]


NOT_UTF8 = "not UTF-8"
TO_UTF8 = "save the text as UTF-8: iconv -f latin1 -t utf-8 OLD > NEW"


class BadRow(DataError):
    """One row cannot be used. ``reason`` is the same for all rows with this fault: the ledger counts by it."""

    def __init__(self, message: str, *, reason: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason

    def __reduce__(self) -> Any:  # it comes back from the processes that tokenise
        return partial(BadRow, reason=self.reason, hint=self.hint), (self.message,)


@contextmanager
def in_row(where: str) -> Iterator[None]:
    """Inside, a BadRow gets the place of its row in front of its words."""
    try:
        yield
    except BadRow as bad:
        raise BadRow(f"{where}: {bad.message}", reason=bad.reason, hint=bad.hint) from None


def first_doubled(names: Iterable[str]) -> str | None:
    """The first name that was there before; None without one. Rows of tens of thousands of columns exist."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


_OF_MESSAGES = {
    "reasoning_content": "write the thought into the content: <think>…</think>",
    "reasoning": "write the thought into the content: <think>…</think>",
    "thinking": "write the thought into the content: <think>…</think>",
    "images": "fitune trains on text: leave the rows with images out",
}
_OF_ROWS = {
    "image": "fitune trains on text: leave the rows with images out",
    "images": "fitune trains on text: leave the rows with images out",
    "videos": "fitune trains on text: leave the rows with videos out",
    "audios": "fitune trains on text: leave the rows with sound out",
}
_SWITCHES = ("weight", "train", "training", "trainable")
"""0 or false at an answer: it is not to be learned."""


def refuse_unsupported_row(fields: Mapping[str, Any]) -> None:
    """Raises BadRow when the row has more than text for the model to see."""
    for name in _OF_ROWS.keys() & fields.keys():
        if _says_something(fields[name]):
            raise _not_supported(name, fields[name], _OF_ROWS[name])


def refuse_unsupported_message(place: str, message: Mapping[str, Any]) -> None:
    """Raises BadRow when the message says more than its text, or is an answer that is not to be learned."""
    for name in _OF_MESSAGES.keys() & message.keys():
        if _says_something(message[name]):
            raise _not_supported(f"{place}.{name}", message[name], _OF_MESSAGES[name])
    for name in _SWITCHES:
        if (value := message.get(name)) is not None and value != 1:
            hint = "fitune learns every answer: end the conversation before those that are not to be learned"
            raise _not_supported(f"{place}.{name}", value, hint)


_INTERNAL = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode noncharacters, reserved for a program's own use: rendering marks places in a text with them."""


def require_characters(field: str, value: str, *, hint: str) -> None:
    """Raises BadRow for text that no tokenizer can encode, or that rendering could not tell from its own marks."""
    if value.isascii():
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(value[error.start]):04X} at character {error.start + 1}"
        raise BadRow(
            f"field {field!r} contains an unpaired surrogate ({where})",
            reason="unpaired surrogate",
            hint=hint,
        ) from None
    found = next((mark for mark in _INTERNAL if mark in value), None)
    if found:
        raise BadRow(
            f"field {field!r} holds the noncharacter U+{ord(found):04X}",
            reason="noncharacter",
            hint=hint,
        )


def _says_something(value: Any) -> bool:
    """Empty lists and texts are how a column is filled where a row has nothing in it."""
    return value is not None and value is not False and value not in ("", "[]", [], {})


def _not_supported(field: str, value: Any, hint: str) -> BadRow:
    name = field.rpartition(".")[2]
    return BadRow(
        f"field {field!r} is not supported: {value!r:.60}",
        reason=f"{name} not supported",
        hint=hint,
    )


_PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_WORDS = ("true", "false")
_NUMBERS = (0, 1, "0", "1")


def refuse_good_and_bad(row: Row) -> None:
    """Raises DataError for a row that holds good and bad answers, or good and bad steps, side by side."""
    for chosen, rejected in _PAIRS:
        if chosen in row.fields and rejected in row.fields:
            names = ("prompt", "question", "instruction", "input")
            asked = next((name for name in names if name in row.fields), "…")
            is_whole = isinstance(row.fields[chosen], list) and not isinstance(row.fields.get(asked), list)
            columns = f"messages: {chosen}" if is_whole else f"prompt: {asked}, completion: {chosen}"
            hint = f"to learn the chosen answers: columns: {{{columns}}}"
            raise _preference_data(row, f"{chosen} and {rejected}", "pairs, as for DPO", hint)
    if "completions" in row.fields and "labels" in row.fields:
        raise _stepwise(row)


def refuse_judged(row: Row) -> None:
    """Raises DataError for a row that says whether its answer is good. Not for plain text."""
    fields = row.fields
    for name in ("label", "kto_tag"):
        if name in fields and _is_judgement(fields[name], fields):
            raise _preference_data(
                row,
                f"{name}: {str(fields[name]).lower()} beside an answer",
                "as for KTO",
                f"keep the rows whose {name} is true and leave the column out; if {name} says nothing about "
                "the answer, name the columns to be read: columns: {prompt: …, completion: …}",
            )
    labels = fields.get("labels")
    if isinstance(labels, list) and labels and all(isinstance(item, bool) for item in labels):
        raise _stepwise(row)


def _is_judgement(value: Any, fields: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in _WORDS):
        return True
    return isinstance(value, int | str) and value in _NUMBERS and {"prompt", "completion"} <= fields.keys()


def _stepwise(row: Row) -> DataError:
    return _preference_data(
        row,
        "labels of single steps",
        "as for process reward models",
        "write the rows whose steps are all right as {prompt, completion}",
    )


def _preference_data(row: Row, found: str, kind: str, hint: str) -> DataError:
    return DataError(
        f"{row.where}: the row has {found}: preference data ({kind}). fitune has no preference methods; it would "
        "learn every answer, the bad ones too",
        hint=hint,
    )
