"""A conversation as its chat template writes it, with every place accounted for."""

import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fitune.data.conversations.call_styles import (
    CALL_STYLES,
    PROBE_TOOLS,
    calls_for_template,
    shielded,
    tool_names,
    with_ids,
)
from fitune.data.conversations.messages import Message
from fitune.data.conversations.sandbox import MARK_CLOSE, MARK_OPEN, SafeTemplate, TemplateFailed
from fitune.data.conversations.tool_calls import ToolCall
from fitune.data.reading.rows import BadRow


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of rendered text that is encoded by itself.

    ``plain`` text is content whose special-token text must not turn into special ids. ``first`` says that nothing
    stands before it, ``after_special`` that a special token does.
    """

    text: str
    supervised: bool
    plain: bool
    first: bool
    after_special: bool = False


_SHIELD = "\ufdd2"
"""Put inside special-token text of the content, so that the template's own special tokens can be told from it."""
_ESCAPED_SHIELD = "\\ufdd2"
"""As a template writes it that escapes all that is not ASCII."""
_MARKS = re.compile(f"[{MARK_OPEN}{MARK_CLOSE}{_SHIELD}]")
_STANDIN = "\ufdd3"
_STANDINS = re.compile(f"{_STANDIN}\\d+{_STANDIN}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text without marks. Places count its characters; ``shielded`` are starts of special-token text in content."""

    text: str
    generated: tuple[tuple[int, int], ...]
    shielded: frozenset[int]


class Renderer:
    """Renders messages and cuts the result into pieces for the tokenizer."""

    def __init__(
        self, template: SafeTemplate, specials: dict[str, str], special_texts: tuple[str, ...]
    ) -> None:
        self._template, self._specials, self._special_texts = template, specials, special_texts
        self._eos = specials.get("eos_token", "")
        self._tools = ""
        any_special = "|".join(map(re.escape, special_texts)) or r"(?!)"
        self._special_pattern = re.compile(any_special)
        self._next_special = re.compile(rf"\s*({any_special})")
        self.has_marks = template.has_marks

    def render(self, messages: Iterable[Message], *, ask: bool, where: str) -> Rendered:
        """``ask`` adds the words after which the model answers. Raises BadRow when the template refuses."""
        messages = list(messages)
        if self._tools or any(message.calls for message in messages):
            marked = self._with_calls(messages, ask=ask, where=where)
        else:
            marked = self._marked([self._turn(message) for message in messages], None, ask=ask, where=where)
        if (rendered := _without_marks(marked)) is None:
            raise BadRow(
                f"{where}: the template moves or cuts the text of its generation blocks",
                reason="generation blocks not found in the template's text",
                hint="put {% generation %}…{% endgeneration %} around text as it is written",
            )
        return rendered

    def with_tools(self, tools: str) -> "Renderer":
        """A renderer that shows the model ``tools``, the JSON text of a list; "" for none."""
        if not tools:
            return self
        _ = self.opening, self._end_tokens  # found once, without tools
        other = copy.copy(self)
        other._tools = tools
        return other

    def _marked(self, turns: list[dict[str, Any]], tools: Any, *, ask: bool, where: str) -> str:
        try:
            return self._template.render(
                messages=turns, tools=tools, documents=None, add_generation_prompt=ask, **self._specials
            )
        except TemplateFailed as error:
            raise _refusal(turns, error, where) from None

    def _turn(self, message: Message, **how: bool) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, "content": self._shield(message.content)}
        if message.calls:
            turn |= calls_for_template(message, self._shield, **how)
        if message.call_id:
            turn["tool_call_id"] = message.call_id
        return turn

    def _with_calls(self, messages: Sequence[Message], *, ask: bool, where: str) -> str:
        """The text of the first of CALL_STYLES in which the template shows every call and every tool."""
        messages = with_ids(messages)
        tools = shielded(json.loads(self._tools), self._shield) if self._tools else None
        needed = [call.name for message in messages for call in message.calls] + tool_names(self._tools)
        fault: BadRow | None = None
        for style in CALL_STYLES:
            try:
                turns = [self._turn(message, **style) for message in messages]
                marked = self._marked(turns, tools, ask=ask, where=where)
            except BadRow as bad:
                fault = fault or bad
                continue
            plain = _MARKS.sub("", marked)
            missing = next((name for name in needed if name not in plain), None)
            if missing is None and _ESCAPED_SHIELD not in marked:
                return marked
            fault = _calls_left_out(missing, where)
        assert fault is not None
        raise fault

    def _shield(self, content: str) -> str:
        return self._special_pattern.sub(lambda found: found[0][0] + _SHIELD + found[0][1:], content)

    def frame(
        self, messages: Sequence[Message], replaced: dict[int, str], *, ask: bool, where: str
    ) -> list[str]:
        """The text around the messages numbered in ``replaced``: one part before each, one after the last.

        The template sees a stand-in there, behind the text that is given for it.
        """
        standins = [
            replace(message, content=f"{replaced[number]}{_STANDIN}{number}{_STANDIN}")
            if number in replaced
            else message
            for number, message in enumerate(messages)
        ]
        return _STANDINS.split(self.render(standins, ask=ask, where=where).text)

    @property
    def eos_piece(self) -> Piece:
        """Token that ends an answer behind which the template writes none."""
        return Piece(self._eos, supervised=True, plain=False, first=False)

    def is_ended(self, rendered: Rendered, begin: int, end: int) -> bool:
        """True if a special token of the template's own ends that stretch, white space behind it allowed."""
        stop = begin + len(rendered.text[begin:end].rstrip())
        return self._is_after_special(rendered, stop, begin)

    def _is_after_special(self, rendered: Rendered, place: int, begin: int = 0) -> bool:
        """True if a special token of the template's own stands directly before ``place``, and not before ``begin``."""
        if not rendered.text.endswith(self._special_texts, begin, place):
            return False
        found = next(text for text in self._special_texts if rendered.text.endswith(text, begin, place))
        return place - len(found) not in rendered.shielded

    def through_end_token(self, text: str, end: int) -> int:
        """End of the token that follows at ``end`` and ends an answer, perhaps behind white space; else ``end``."""
        found = self._next_special.match(text, end)
        return found.end() if found and found[1] in self._end_tokens else end

    @cached_property
    def _end_tokens(self) -> frozenset[str]:
        """EOS, what follows the last answer, and what follows questions and earlier answers alike (gpt-oss ends the
        last answer with another token than those before). Anything else behind an answer opens the next turn."""
        last = self._special_token_after(1, turns=1)
        question, earlier = (self._special_token_after(number, turns=2) for number in (0, 1))
        alike = {earlier} if last and earlier == question else set()
        return (frozenset({self._eos, last}) | alike) - {""}

    @cached_property
    def _call_ends(self) -> frozenset[str]:
        """The token that ends an answer with calls, where it is another one than usual: Llama's <|eom_id|>."""
        asked = [Message("user", "ping"), Message("assistant", "", (ToolCall("ping", "{}"),))]
        try:
            text = self.with_tools(PROBE_TOOLS).render(asked, ask=False, where="a try").text
        except BadRow:
            return frozenset()
        found = self._special_pattern.findall(text)
        return frozenset(found[-1:])

    def end_of_call(self, rendered: Rendered, begin: int) -> int:
        """End of the answer with calls that begins at ``begin``, its end token included; -1 without an end token."""
        ends = self._end_tokens | self._call_ends
        for found in self._special_pattern.finditer(rendered.text, begin):
            if found[0] in ends and found.start() not in rendered.shielded:
                return found.end()
        return -1

    def _special_token_after(self, number: int, *, turns: int) -> str:
        """Text behind that message in a conversation of so many questions and answers; "" for none."""
        messages = [Message("user", "ping"), Message("assistant", "pong")] * turns
        try:
            *_, after = self.frame(messages, {number: ""}, ask=False, where="a try")
        except BadRow:
            return ""
        found = self._next_special.match(after)
        return found[1] if found else ""

    @cached_property
    def opening(self) -> str:
        """Text that a generation block writes although the prompt ends with it: a header, in SmolLM3's template."""
        question = [Message("user", "ping")]
        try:
            prompt = self.render(question, ask=True, where="a try").text
            spans = self.render([*question, Message("assistant", "pong")], ask=False, where="a try").generated
        except BadRow:
            return ""
        return prompt[spans[-1][0] :] if spans else ""

    def pieces(self, rendered: Rendered, start: int, end: int, *, supervised: bool) -> list[Piece]:
        """The text from ``start`` to ``end``, split only where special-token text has to stay plain."""
        cuts = [(start, end, False)]
        if rendered.shielded and any(start <= place < end for place in rendered.shielded):
            cuts = self._shielded_cuts(rendered, start, end)
        return [
            Piece(
                rendered.text[a:b],
                supervised=supervised,
                plain=plain,
                first=a == 0,
                after_special=a > 0 and self._is_after_special(rendered, a),
            )
            for a, b, plain in cuts
            if a < b
        ]

    def _shielded_cuts(self, rendered: Rendered, start: int, end: int) -> list[tuple[int, int, bool]]:
        """Stretches between the template's own special tokens as (begin, end, plain)."""
        cuts, at = [], start
        for found in self._special_pattern.finditer(rendered.text, start, end):
            if found.start() not in rendered.shielded:
                cuts += [(at, found.start(), True), (found.start(), found.end(), False)]
                at = found.end()
        return [*cuts, (at, end, True)]


def _without_marks(marked: str) -> Rendered | None:
    """Take the marks out and say where they stood. None when they do not come in pairs."""
    if marked.isascii():
        return Rendered(marked, (), frozenset())
    opened: list[int] = []
    generated: list[tuple[int, int]] = []
    shielded: set[int] = set()
    parts: list[str] = []
    length = at = 0
    for mark in _MARKS.finditer(marked):
        parts.append(marked[at : mark.start()])
        length += mark.start() - at
        at = mark.end()
        if mark[0] == MARK_OPEN:
            opened.append(length)
        elif mark[0] == MARK_CLOSE:
            if not opened:
                return None
            generated.append((opened.pop(), length))
        else:
            shielded.add(length - 1)
    if opened:
        return None
    return Rendered("".join([*parts, marked[at:]]), tuple(generated), frozenset(shielded))


def _calls_left_out(name: str | None, where: str) -> BadRow:
    what = f"leaves out the tool {name!r:.60}" if name else "escapes special tokens inside calls"
    return BadRow(
        f"{where}: this template {what}",
        reason="tools or calls left out by the template",
        hint="give a chat_template that shows tools and tool_calls, or leave such rows out",
    )


def _refusal(turns: list[dict[str, Any]], error: TemplateFailed, where: str) -> BadRow:
    if turns and turns[0]["role"] == "system" and "system" in error.message.lower():
        return BadRow(
            f"{where}: this template does not support a system message: {error.message}",
            reason="system message not supported by the template",
            hint="leave the system message out, or give a chat_template that has a place for it",
        )
    return BadRow(f"{where}: the template failed: {error.message}", reason="refused by the template")
