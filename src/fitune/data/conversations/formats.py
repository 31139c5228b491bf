"""From a row's fields to a conversation or a text.

| format            | fields                                           | becomes                                 |
|-------------------|--------------------------------------------------|-----------------------------------------|
| messages          | messages: [{role, content}]                      | as written                              |
| sharegpt          | conversations: [{from, value}]                   | human -> user, gpt -> assistant         |
| alpaca            | instruction, output[, input, system, history]    | user: instruction, a line break, input  |
| prompt_completion | prompt, completion (texts, or lists of messages) | user: prompt, assistant: completion     |
| question_answer   | question, answer (GSM8K)                         | user: question, assistant: answer       |
| dialogue_summary  | dialogue, summary (SAMSum, DialogSum)            | user: dialogue, assistant: summary      |
| text              | text                                             | the text itself                         |
| columns           | named by the source's column mapping             | as prompt_completion, messages, or text |

detect_format finds which of them a row has; tool_calls.py reads calls of tools, and the tools of a row. Nothing is
added to what the fields say: an instruction in front of a dialogue is the data's to give.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fitune.data.conversations.messages import ROLES, Conversation, Example, Message, Role, Text
from fitune.data.conversations.tool_calls import CALLING, calls_in_text, calls_of, tools_of
from fitune.data.reading.rows import (
    BadRow,
    Row,
    in_row,
    refuse_good_and_bad,
    refuse_judged,
    refuse_unsupported_message,
    refuse_unsupported_row,
    require_characters,
)
from fitune.errors import DataError, did_you_mean
from fitune.values.plan import DataFormat

Columns = tuple[tuple[str, str], ...]

ACCEPTED = (
    "accepted formats: messages [{role, content}], conversations [{from, value}], {instruction, output[, input]}, "
    "{prompt, completion}, {question, answer}, {dialogue, summary}, {text}, or columns: {prompt: …, completion: …}"
)

_RECOGNISED: tuple[tuple[DataFormat, tuple[str, ...]], ...] = (
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt_completion", ("prompt", "completion")),
    ("question_answer", ("question", "answer")),
    ("dialogue_summary", ("dialogue", "summary")),
    ("text", ("text",)),
)
"""The first format all of whose fields are there is taken."""


def detect_format(row: Row, columns: Columns = ()) -> DataFormat:
    """The format whose fields are all there; a column mapping goes before everything.

    Raises DataError that names the row and lists the fields found and the formats accepted; and for rows of
    good and bad answers.
    """
    if columns:
        return "columns"
    refuse_good_and_bad(row)
    names = set(row.fields)
    for name, needed in _RECOGNISED:
        if names.issuperset(needed):
            return name
    found = ", ".join(sorted(map(str, names))) or "no fields"
    raise DataError(
        f"{row.where}: format auto: the row has {found}, which is not a known format",
        hint=f"{_mapped(row)}; {ACCEPTED}",
    )


def _mapped(row: Row) -> str:
    """The columns of this row by role, as a recipe and as an option: those whose names sound like it, else open."""
    talks = [name for name, value in row.fields.items() if isinstance(value, list)]
    if talks:
        roles = {"messages": talks[0]}
    else:
        texts = [str(name) for name, value in row.fields.items() if isinstance(value, str)]
        parts = {name: set(re.split(r"[^a-z]+", name.lower())) for name in texts}
        roles = {
            role: next((name for word in words for name in texts if word in parts[name]), "…")
            for role, words in _SOUNDS.items()
        }
    written = ", ".join(f"{role}: {name}" for role, name in roles.items())
    typed = ",".join(f"{role}={name}" for role, name in roles.items())
    option = typed if "…" in typed else shlex.quote(typed)
    return f"columns: {{{written}}} in the recipe, or --columns {option}"


_SOUNDS = {
    "prompt": ("prompt", "instruction", "question", "query", "input", "user", "source", "problem", "q"),
    "completion": (
        "completion",
        "response",
        "answer",
        "output",
        "reply",
        "assistant",
        "target",
        "solution",
        "a",
    ),
}
"""Words that a column's name may have as a part, the likeliest first."""


_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the field for the reasoning before an answer."""


def to_example(row: Row, *, format: str, columns: Columns = ()) -> Example:
    """Check a row and turn it into a conversation or a text.

    Raises BadRow naming the row, the field, the value and the accepted formats; DataError when the mapping
    of columns itself makes no sense, and for rows that say whether their answer is good.
    """
    if format == "auto":
        format = detect_format(row, columns)
    if columns and format != "columns":
        raise DataError(
            f"columns are mapped but format is {format}", hint="leave format out, or set it to columns"
        )
    with in_row(row.where):
        if format == "columns":
            return _from_columns(row, _checked_columns(columns))
        if format != "text":
            refuse_judged(row)
            refuse_unsupported_row(row.fields)
        example = _READERS[format](row)
        if not isinstance(example, Conversation):
            return example
        last = example.messages[-1]
        if format not in ("messages", "sharegpt") and not last.thought and (thought := _thought(row.fields)):
            last = replace(last, thought=_checked_text("reasoning", thought))
            example = replace(example, messages=(*example.messages[:-1], last))
        return replace(example, tools=tools_of(row.fields))


def _checked_columns(columns: Columns) -> dict[str, str]:
    mapping = dict(columns)
    if "text" in mapping and len(mapping) == 1:
        return mapping
    if {"messages"} <= set(mapping) <= {"messages", "system", "tools"}:
        return mapping
    if not {"prompt", "completion"} <= set(mapping) <= {"system", "prompt", "completion", "tools"}:
        raise DataError(
            f"columns: {mapping} is not a mapping fitune can use",
            hint="map prompt and completion, or messages (and system or tools if there are), or text alone",
        )
    return mapping


def _from_columns(row: Row, mapping: Mapping[str, str]) -> Example:
    if "text" in mapping:
        return Text(_text(row, mapping["text"]), row.where)
    system = _optional_text(row, mapping["system"]) if "system" in mapping else ""
    if "messages" in mapping:
        turns = _turns(row, mapping["messages"])
        example = _conversation(row, [*_system(system), *turns], field=mapping["messages"])
    else:
        example = _asked_and_answered(row, mapping["prompt"], mapping["completion"], system=system)
    return replace(example, tools=tools_of(row.fields, mapping["tools"])) if "tools" in mapping else example


def _asked_and_answered(row: Row, prompt: str, completion: str, *, system: str = "") -> Conversation:
    """Two texts, or two lists of messages."""
    if isinstance(row.fields.get(prompt), list):
        turns = [*_system(system), *_turns(row, prompt), *_turns(row, completion)]
        return _conversation(row, turns, field=completion)
    return _question_and_answer(row, prompt, completion, system=system)


def _question_and_answer(row: Row, prompt: str, completion: str, *, system: str = "") -> Conversation:
    turns = [Message("user", _text(row, prompt)), Message("assistant", _text(row, completion))]
    return _conversation(row, [*_system(system), *turns], field=completion)


def _from_alpaca(row: Row) -> Conversation:
    instruction, extra = _text(row, "instruction"), _optional_text(row, "input")
    prompt = f"{instruction}\n{extra}" if extra else instruction
    turns = [*_system(_optional_text(row, "system")), *_history(row)]
    turns += [Message("user", prompt), Message("assistant", _text(row, "output"))]
    return _conversation(row, turns, field="output")


def _history(row: Row) -> list[Message]:
    """Earlier turns: ``[[question, answer], ...]``."""
    turns: list[Message] = []
    for number, pair in enumerate(row.fields.get("history") or []):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _bad(f"history[{number}]", "is not a pair of question and answer", "wrong type", pair)
        for role, content in zip(("user", "assistant"), pair, strict=True):
            turns.append(Message(ROLES[role], _checked_text(f"history[{number}]", content)))
    return turns


def _from_sharegpt(row: Row) -> Conversation:
    turns = _turns(row, "conversations")
    if not any(turn.role == "system" for turn in turns):
        turns = [*_system(_optional_text(row, "system")), *turns]
    return _conversation(row, turns, field="conversations")


_READERS: dict[str, Callable[[Row], Example]] = {
    "messages": lambda row: _conversation(row, _turns(row, "messages"), field="messages"),
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": lambda row: _asked_and_answered(row, "prompt", "completion"),
    "question_answer": lambda row: _question_and_answer(row, "question", "answer"),
    "dialogue_summary": lambda row: _question_and_answer(row, "dialogue", "summary"),
    "text": lambda row: Text(_text(row, "text"), row.where),
}


def _turns(row: Row, field: str) -> list[Message]:
    """A list of ``{role, content}`` or ``{from, value}``. An empty system message says nothing and is left out."""
    turns = _present(row, field)
    if not isinstance(turns, list):
        raise _bad(field, "is not a list of messages", "wrong type", turns)
    messages = []
    for number, turn in enumerate(turns):
        name = f"{field}[{number}]"
        if not isinstance(turn, dict):
            raise _bad(name, "is not a message", "wrong type", turn)
        role_key, text_key = ("from", "value") if "from" in turn else ("role", "content")
        role = _role(f"{name}.{role_key}", turn.get(role_key))
        thought = _thought(turn) if role == "assistant" else ""
        rest = {
            key: turn[key]
            for key in turn
            if not thought or turn[key] != thought or key not in _THOUGHT_FIELDS
        }
        refuse_unsupported_message(name, rest)
        if role == "system" and turn.get(text_key) == "":
            continue
        message = _message(name, role, turn, said_by=turn[role_key], text_key=text_key)
        if thought:
            message = replace(message, thought=_checked_text(f"{name}: reasoning", thought))
        messages.append(message)
    return messages


def _thought(turn: Mapping[str, Any]) -> str:
    """The reasoning before an answer, from the first field that has one; "" for none."""
    texts = (turn.get(field) for field in _THOUGHT_FIELDS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def _message(name: str, role: Role, turn: Mapping[str, Any], *, said_by: str, text_key: str) -> Message:
    place, content = f"{name}.{text_key}", turn.get(text_key)
    if said_by in CALLING:
        return Message(role, "", calls_in_text(place, content))
    calls = calls_of(name, turn) if role == "assistant" else ()
    content = _joined(place, content)
    if role == "tool":
        if isinstance(content, dict | list | int | float):
            content = json.dumps(content, ensure_ascii=False)
        id = turn.get("tool_call_id")
        return Message(role, _checked_text(place, content), call_id=id if isinstance(id, str) else "")
    if calls and content in (None, ""):
        return Message(role, "", calls)
    return Message(role, _checked_text(place, content), calls)


def _joined(place: str, content: Any) -> Any:
    """A list of parts, ``[{type: text, text: …}]``, as one text; any other content as it is. Raises BadRow for a part
    that is no text."""
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and "type" in part for part in content
    ):
        return content
    for number, part in enumerate(content):
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise BadRow(
                f"field '{place}[{number}]' is {part['type']}, expected text: {_short(part)}",
                reason=f"{part['type']} not supported",
                hint="fitune trains on text: leave the rows with other parts out",
            )
    return "".join(part["text"] for part in content)


def _role(field: str, value: Any) -> Role:
    if not isinstance(value, str) or value not in ROLES:
        guess = did_you_mean(value, tuple(ROLES)) if isinstance(value, str) else None
        known = f"is none of {', '.join(ROLES)}" + (f" ({guess})" if guess else "")
        raise _bad(field, known, "unknown role", value)
    return ROLES[value]


def _conversation(row: Row, messages: list[Message], *, field: str) -> Conversation:
    """Check the order: at most one system message, first; then user, assistant, user, …, assistant.

    After an answer with calls come the tools' answers, and the assistant again.
    """
    spoken = messages[1:] if messages and messages[0].role == "system" else messages
    expected: tuple[Role, ...] = ("user",)
    for number, message in enumerate(spoken):
        if message.role not in expected:
            place = f"message {len(messages) - len(spoken) + number + 1} is from {message.role}"
            raise _bad(field, f"{place}, expected {' or '.join(expected)}", "roles out of order")
        if message.role == "assistant":
            expected = ("tool",) if message.calls else ("user",)
        else:
            expected = ("assistant", "tool") if message.role == "tool" else ("assistant",)
    if not spoken or spoken[-1].role != "assistant":
        raise _bad(field, "does not end with an answer of the assistant", "no answer")
    return Conversation(tuple(messages), row.where)


def _system(content: str) -> list[Message]:
    return [Message("system", content)] if content else []


def _text(row: Row, field: str) -> str:
    return _checked_text(field, _present(row, field))


def _optional_text(row: Row, field: str) -> str:
    value = row.fields.get(field)
    return _checked_text(field, value) if value not in (None, "") else ""


def _present(row: Row, field: str) -> Any:
    if field not in row.fields:
        found = ", ".join(map(str, row.fields)) or "no fields"
        raise _bad(field, f"is missing; the row has {found}", "missing field")
    return row.fields[field]


def _checked_text(field: str, value: Any) -> str:
    if value is None:
        raise _bad(field, "is null", "null field")
    if not isinstance(value, str):
        raise _bad(field, f"is {type(value).__name__}, expected text", "wrong type", value)
    if not value.strip():
        raise _bad(field, "is empty", "empty field", value)
    require_characters(field, value, hint=ACCEPTED)
    return value


def _bad(field: str, what: str, reason: str, value: Any = None) -> BadRow:
    shown = "" if value is None else f": {_short(value)}"
    return BadRow(f"field {field!r} {what}{shown}", reason=reason, hint=ACCEPTED)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
