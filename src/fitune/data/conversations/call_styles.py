"""Calls of tools as chat templates take them. Templates differ, so there are several styles to be tried in turn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fitune.data.conversations.messages import Message

CALL_STYLES: tuple[dict[str, bool], ...] = (
    {"as_text": False, "without_content": False},
    {"as_text": False, "without_content": True},
    {"as_text": True, "without_content": False},
    {"as_text": True, "without_content": True},
)
"""Arguments as an object, as transformers has it, or as text (DeepSeek's templates join it to other text); the content
of an answer that says nothing else as "" or as none."""

PROBE_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}},
        }
    ]
)
_ID_LENGTH = 9
"""Mistral's templates take no other length."""


def calls_for_template(
    message: Message, shield: Callable[[str], str], *, as_text: bool, without_content: bool
) -> dict[str, Any]:
    """Fields of a turn with calls, as in transformers' chat templates."""
    calls = [
        {
            "type": "function",
            "id": call.id,
            "function": {
                "name": shield(call.name),
                "arguments": shield(call.arguments)
                if as_text
                else shielded(json.loads(call.arguments), shield),
            },
        }
        for call in message.calls
    ]
    content = {"content": None} if without_content and not message.content else {}
    return {"tool_calls": calls, **content}


def shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """``value`` with every text in it shielded, names of fields included."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [shielded(item, shield) for item in value]
    if isinstance(value, dict):
        return {shield(key): shielded(item, shield) for key, item in value.items()}
    return value


def tool_names(tools: str) -> list[str]:
    """Names of the functions in the JSON text of a list of tools."""
    return [tool["function"]["name"] for tool in json.loads(tools)] if tools else []


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have ids, and whose tools' answers name theirs: some templates take no others.

    Where the data has none, calls are numbered, and a tool answers the first call that no other answered.
    """
    named, number, open_ids = [], 0, list[str]()
    for message in messages:
        if message.calls:
            calls = []
            for call in message.calls:
                number += 1
                calls.append(call if call.id else replace(call, id=f"call{number:0{_ID_LENGTH - 4}d}"))
            open_ids = [call.id for call in calls]
            message = replace(message, calls=tuple(calls))
        elif message.role == "tool":
            id = message.call_id or (open_ids[0] if open_ids else "")
            open_ids = [each for each in open_ids if each != id]
            message = replace(message, call_id=id)
        named.append(message)
    return named
