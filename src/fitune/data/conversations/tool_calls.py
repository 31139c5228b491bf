"""Calls of tools in conversations, in the ways in which data says them.

| in the data                                                         | becomes                                    |
|---------------------------------------------------------------------|--------------------------------------------|
| tool_calls: [{function: {name, arguments}}], arguments as JSON text | an answer of the assistant with calls      |
| function_call: {name, arguments} (OpenAI before 2024)               | the same                                   |
| a turn from function_call or tool_call, its text the call as JSON   | the same                                   |
| a turn from tool, observation, function, ipython or tool_response   | the tool's answer                          |
| tools or functions: [{name, parameters}], or that as JSON text      | the tools that the template shows the model |

What they look like to the model is its chat template's to say.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fitune.data.conversations.messages import Message, ToolCall
from fitune.data.reading.rows import BadRow, require_characters
from fitune.values.serial import require_shallow

CALLING = ("function_call", "tool_call")
"""Roles whose text is a call."""
_TOOL_FIELDS = ("tools", "functions")
_HINT = 'a call is {"name": "search", "arguments": {"query": "…"}}'
_TOOLS_HINT = (
    'tools are [{"type": "function", "function": {"name": "search", "description": "…", "parameters": {…}}}]'
)


def calls_of(place: str, message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The calls in a message's ``tool_calls`` or ``function_call``. Raises BadRow for one that names no tool."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = _parsed(f"{place}.tool_calls", calls)
    if calls:
        if not isinstance(calls, list):
            raise _bad(f"{place}.tool_calls", "is not a list of calls", calls, _HINT)
        return tuple(_call(f"{place}.tool_calls[{number}]", call) for number, call in enumerate(calls))
    single = message.get("function_call")
    if not single:
        return ()
    if isinstance(single, str):
        single = _parsed(f"{place}.function_call", single)
    return (_call(f"{place}.function_call", single),)


def calls_in_text(place: str, text: Any) -> tuple[ToolCall, ...]:
    """The call, or the list of calls, that the text of a ``function_call`` turn is. Raises BadRow."""
    value = _parsed(place, text) if isinstance(text, str) else text
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise _bad(place, "holds no call", text, _HINT)
    return tuple(_call(place, call) for call in calls)


def tools_of(fields: Mapping[str, Any], field: str = "") -> str:
    """The tools of a row as JSON text of a list; "" where it has none. ``field`` is read, else tools or functions."""
    name = field or next((name for name in _TOOL_FIELDS if fields.get(name)), "")
    value = fields.get(name) if name else None
    if isinstance(value, str) and value.strip():
        value = _parsed(name, value)
    if value is None or value == "" or value == []:
        return ""
    if not isinstance(value, list):
        raise _bad(name, "is not a list of tools", value, _TOOLS_HINT)
    return _json(name, [_tool(f"{name}[{number}]", tool) for number, tool in enumerate(value)])


def _tool(place: str, tool: Any) -> dict[str, Any]:
    """A tool as transformers' templates expect it. Columns of a table fill each schema with nulls for other tools'."""
    if isinstance(tool, str):
        tool = _parsed(place, tool)
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _bad(place, "names no tool", tool, _TOOLS_HINT)
    return tool if "function" in tool else {"type": "function", "function": tool}


def _call(place: str, call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"].strip()
    ):
        raise _bad(place, "names no tool", call, _HINT)
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parsed(f"{place}.arguments", arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict | None):
        raise _bad(f"{place}.arguments", "are not named: a JSON object is expected", arguments, _HINT)
    id = call.get("id")
    require_characters(place, function["name"], hint=_HINT)
    return ToolCall(function["name"], _json(place, arguments or {}), id if isinstance(id, str) else "")


def _json(place: str, value: Any) -> str:
    try:
        require_shallow(value)
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _bad(place, f"cannot be written as JSON: {error}", None, _HINT) from None
    require_characters(place, text, hint=_HINT)
    return text


def _parsed(place: str, text: str) -> Any:
    try:
        value = json.loads(text)
        require_shallow(value)
    except (ValueError, RecursionError) as error:
        cause = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise _bad(place, f"is not JSON ({cause})", text, _HINT) from None
    return value


def _bad(place: str, what: str, value: Any, hint: str) -> BadRow:
    shown = "" if value is None else f": {value!r:.80}"
    return BadRow(f"field {place!r} {what}{shown}", reason="call of a tool cannot be read", hint=hint)


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
