"""Conversations of messages, and plain texts: the two forms that every format of rows is turned into."""

import json
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]

ROLES: dict[str, Role] = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
"""Role names as they stand in data -> ours."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name, its arguments as the text of a JSON object, and an id ("" where the data has none)."""

    name: str
    arguments: str
    id: str = ""

    @property
    def text(self) -> str:
        """A JSON object with name and arguments; the id is left out."""
        return f'{{"name": {json.dumps(self.name, ensure_ascii=False)}, "arguments": {self.arguments}}}'


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. An answer may be calls of tools, with or without text; ``call_id`` says which call a tool answers.

    ``thought`` is the reasoning before an answer, where the data has it in a field of its own.
    """

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    thought: str = ""

    @property
    def text(self) -> str:
        """All that it says to others, calls included, for people."""
        return "\n".join(part for part in (self.content, *(call.text for call in self.calls)) if part)


@dataclass(frozen=True, slots=True)
class Conversation:
    """An optional system message, then user and assistant in turn, and after calls the tools; an answer is last.

    ``tools`` is the JSON text of the tools that the model may call, as the template shows them; "" for none.
    """

    messages: tuple[Message, ...]
    where: str
    tools: str = ""

    @property
    def text(self) -> str:
        """All that is said, tools included, for people and for counts."""
        return "\n".join(part for part in (self.tools, *(m.text for m in self.messages)) if part)


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: every token is learned."""

    text: str
    where: str


Example = Conversation | Text
