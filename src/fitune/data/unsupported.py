"""Fields of rows that change what should be learned and that fitune does not honour: refused by name.

Other tools read these fields; to pass over them in silence would train something else than the data says.
"""

from collections.abc import Mapping
from typing import Any

from fitune.data.rows import BadRow, Row

_OF_MESSAGES = {
    "tool_calls": "leave the rows with calls of tools out",
    "function_call": "leave the rows with calls of functions out",
    "reasoning_content": "write the thought into the content: <think>…</think>",
    "reasoning": "write the thought into the content: <think>…</think>",
    "thinking": "write the thought into the content: <think>…</think>",
    "images": "fitune trains on text: leave the rows with images out",
}
_OF_ROWS = {
    "tools": "write the tools into the system message, and leave the column out",
    "functions": "write the functions into the system message, and leave the column out",
    "image": "fitune trains on text: leave the rows with images out",
    "images": "fitune trains on text: leave the rows with images out",
    "videos": "fitune trains on text: leave the rows with videos out",
    "audios": "fitune trains on text: leave the rows with sound out",
}
_SWITCHES = ("weight", "train", "training", "trainable")
"""0 or false at an answer: it is not to be learned."""


def refuse_unsupported_row(row: Row) -> None:
    """Raises BadRow when the row has more than text for the model to see."""
    for name in _OF_ROWS.keys() & row.fields.keys():
        if _says_something(row.fields[name]):
            raise _refusal(row, name, row.fields[name], _OF_ROWS[name])


def refuse_unsupported_message(row: Row, place: str, message: Mapping[str, Any]) -> None:
    """Raises BadRow when the message says more than its text, or is an answer that is not to be learned."""
    for name in _OF_MESSAGES.keys() & message.keys():
        if _says_something(message[name]):
            raise _refusal(row, f"{place}.{name}", message[name], _OF_MESSAGES[name])
    for name in _SWITCHES:
        if (value := message.get(name)) is not None and value != 1:
            hint = "fitune learns every answer: end the conversation before those that are not to be learned"
            raise _refusal(row, f"{place}.{name}", value, hint)


def _says_something(value: Any) -> bool:
    """Empty lists and texts are how a column is filled where a row has nothing in it."""
    return value is not None and value is not False and value not in ("", "[]", [], {})


def _refusal(row: Row, field: str, value: Any, hint: str) -> BadRow:
    name = field.rpartition(".")[2]
    return BadRow(
        f"{row.where}: field {field!r} is not supported: {value!r:.60}",
        reason=f"{name} not supported",
        hint=hint,
    )
