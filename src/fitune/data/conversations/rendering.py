"""A conversation as its chat template writes it, with every place accounted for."""

import copy
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fitune.data.conversations.messages import Message, ToolCall
from fitune.data.conversations.sandbox import (
    MARKS,
    SHIELD,
    Rendered,
    SafeTemplate,
    TemplateFailed,
    without_marks,
)
from fitune.data.conversations.tool_calls import (
    CALL_STYLES,
    PROBE_TOOLS,
    calls_for_template,
    shielded,
    tool_names,
    with_ids,
)
from fitune.data.reading.rows import BadRow


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of rendered text that is encoded by itself.

    ``plain`` text is content whose special-token text must not turn into special ids. ``first`` says that nothing
    stands before it, ``after_special`` that a special token does. ``empty_thought``: it is a thinking block without
    content, which the template put before an answer of its own accord.
    """

    text: str
    supervised: bool
    plain: bool
    first: bool
    after_special: bool = False
    empty_thought: bool = False


_ESCAPED_SHIELD = "\\ufdd2"
"""As a template writes it that escapes all that is not ASCII."""
_STANDIN = "\ufdd3"
_TEMPLATE_FIELDS = ("reasoning_content", "thinking")
"""Names under which templates read a thought: Qwen, GLM and Nemotron the first, gpt-oss and LFM the second."""
_STANDINS = re.compile(f"{_STANDIN}\\d+{_STANDIN}")
_PING, _PONG = Message("user", "ping"), Message("assistant", "pong")
_CALL = Message("assistant", "", (ToolCall("look_up", "{}"),))


@dataclass(frozen=True, slots=True)
class _Endings:
    """``tokens`` end an answer. ``openings``: role -> token that opens its turn, where a template has no end tokens.
    ``behind_last``: text after the last answer. ``between``: text from an answer to the next question."""

    tokens: frozenset[str]
    openings: dict[str, str]
    behind_last: str
    between: str


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

    def render(self, messages: Iterable[Message], *, ask: bool) -> Rendered:
        """``ask`` adds the words after which the model answers. Raises BadRow when the template refuses."""
        messages = list(messages)
        if self._tools or any(message.calls for message in messages):
            marked = self._with_calls(messages, ask=ask)
        else:
            marked = self._marked([self._turn(message) for message in messages], None, ask=ask)
        if (rendered := without_marks(marked)) is None:
            raise BadRow(
                "the template moves or cuts the text of its generation blocks",
                reason="generation blocks not found in the template's text",
                hint="put {% generation %}…{% endgeneration %} around text as it is written",
            )
        return rendered

    def with_tools(self, tools: str) -> "Renderer":
        """A renderer that shows the model ``tools``, the JSON text of a list; "" for none."""
        if not tools:
            return self
        _ = self.opening, self._endings, self._reads_thoughts  # found once, without tools
        other = copy.copy(self)
        other._tools = tools
        return other

    def _marked(self, turns: list[dict[str, Any]], tools: Any, *, ask: bool) -> str:
        try:
            return self._template.render(
                messages=turns, tools=tools, documents=None, add_generation_prompt=ask, **self._specials
            )
        except TemplateFailed as error:
            if turns and turns[0]["role"] == "system" and "system" in error.message.lower():
                raise BadRow(
                    f"this template does not support a system message: {error.message}",
                    reason="system message not supported by the template",
                    hint="leave the system message out, or give a chat_template that has a place for it",
                ) from None
            raise BadRow(f"the template failed: {error.message}", reason="refused by the template") from None

    def _turn(self, message: Message, **how: bool) -> dict[str, Any]:
        content, thought = message.content, {}
        if message.thought and self._reads_thoughts:
            thought = dict.fromkeys(_TEMPLATE_FIELDS, self._shield(message.thought))
        elif message.thought:
            content = f"<think>\n{message.thought.strip()}\n</think>\n\n{content}"
        turn: dict[str, Any] = {"role": message.role, "content": self._shield(content), **thought}
        if message.calls:
            turn |= calls_for_template(message, self._shield, **how)
        if message.call_id:
            turn["tool_call_id"] = message.call_id
        return turn

    def _with_calls(self, messages: Sequence[Message], *, ask: bool) -> str:
        """The text of the first of CALL_STYLES in which the template shows every call and every tool."""
        messages = with_ids(messages)
        tools = shielded(json.loads(self._tools), self._shield) if self._tools else None
        needed = [call.name for message in messages for call in message.calls] + tool_names(self._tools)
        fault: BadRow | None = None
        for style in CALL_STYLES:
            try:
                turns = [self._turn(message, **style) for message in messages]
                marked = self._marked(turns, tools, ask=ask)
            except BadRow as bad:
                fault = fault or bad
                continue
            plain = MARKS.sub("", marked)
            missing = next((name for name in needed if name not in plain), None)
            if missing is None and _ESCAPED_SHIELD not in marked:
                return marked
            fault = _calls_left_out(missing)
        assert fault is not None
        raise fault

    def _shield(self, content: str) -> str:
        return self._special_pattern.sub(lambda found: found[0][0] + SHIELD + found[0][1:], content)

    @cached_property
    def _reads_thoughts(self) -> bool:
        """True if the template shows a thought in a field of its own; else it is written into the content."""
        answer = {"role": "assistant", "content": "pong", **dict.fromkeys(_TEMPLATE_FIELDS, _STANDIN)}
        try:
            return _STANDIN in self._marked([self._turn(_PING), answer], None, ask=False)
        except BadRow:
            return False

    def as_content(self, text: str, *, ending: str) -> Rendered:
        """``text`` of the data, then the template's own ``ending``."""
        rendered = without_marks(self._shield(text) + ending)
        assert rendered is not None, "the data has no marks"
        return rendered

    def frame(self, messages: Sequence[Message], numbers: Collection[int], *, ask: bool) -> list[str]:
        """The text around the messages of these ``numbers``, where the template sees stand-ins: one part before each,
        one after the last."""
        standins = [
            replace(message, content=f"{_STANDIN}{number}{_STANDIN}") if number in numbers else message
            for number, message in enumerate(messages)
        ]
        return _STANDINS.split(self.render(standins, ask=ask).text)

    def closing(self, answer: Message) -> Piece:
        """Token that ends an answer behind which the template writes none."""
        text = self._endings.openings.get("tool" if answer.calls else "user", self._eos)
        return Piece(text, supervised=True, plain=False, first=False)

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

    def through_end_tokens(self, rendered: Rendered, end: int) -> int:
        """End of the tokens that follow at ``end`` and end an answer, perhaps behind white space; else ``end``."""
        while (found := self._next_special.match(rendered.text, end)) and found[1] in self._endings.tokens:
            end = found.end()
        return end

    def end_token_between(self, rendered: Rendered, begin: int, stop: int) -> int:
        """End of the last end token from ``begin`` to ``stop``; -1 for none."""
        for found in reversed(list(self._special_pattern.finditer(rendered.text, begin, stop))):
            if found[0] in self._endings.tokens and found.start() not in rendered.shielded:
                return found.end()
        return -1

    def behind_answer(self, rendered: Rendered, begin: int, stop: int) -> str | None:
        """Text that the template writes behind an answer without an end token, up to the next question's at ``stop``;
        None if something else stands there."""
        behind = self._endings.behind_last if stop == len(rendered.text) else self._endings.between
        return behind if rendered.text.endswith(behind, begin, stop) else None

    @cached_property
    def _endings(self) -> _Endings:
        """How this template ends answers, as it ends those of small conversations.

        End tokens are the tokens after both earlier and last answers (Cohere2 writes two; Phi-3's EOS is behind the
        last alone, <|end|> behind all), or, if there are none, the first one after the last answer; and the token
        after both questions and earlier answers (gpt-oss ends the last answer with another token than those before).
        Anything else behind an answer opens the next turn. In a template without end tokens the next role's token
        ends the answer (GLM-4.5's <|user|> and <|observation|>), unless that token opens answers, too.
        """
        behind_last, question, between = self._behind(1, 1), self._behind(0, 2), self._behind(1, 2)
        last, asked, earlier = map(self._specials_at_start, (behind_last, question, between))
        called = self._text([_PING, _CALL]).rstrip()
        if not last:
            openings = self._openings(earlier, called)
            tokens = {self._eos, *openings.values()} - {""}
            return _Endings(frozenset(tokens), openings, behind_last, between)
        opens_always = self._text([_PING, _PONG]) == self._text([_PING, _PONG], ask=True)
        shared = [] if opens_always else [a for a, b in zip(last, earlier, strict=False) if a == b]
        alike = earlier[:1] if earlier[:1] == asked[:1] else []
        of_calls = self._special_pattern.findall(called)[-1:]  # Llama's <|eom_id|>
        tokens = {*(shared or last[:1]), *alike, *of_calls, *({self._eos} & {*earlier})}
        return _Endings(frozenset(tokens), {}, behind_last, between)

    def _openings(self, earlier: list[str], called: str) -> dict[str, str]:
        """The token that opens the turn of the user and of a tool, where it opens no answer too; none in other
        templates. ``earlier`` tokens follow an answer, ``called`` is a conversation that ends in a call."""
        answered = self._text([_PING, _CALL, Message("tool", "pong")])
        is_continued = called and answered.startswith(called)
        observed = self._specials_at_start(answered[len(called) :]) if is_continued else []
        asking = self._text([_PING], ask=True).removeprefix(self._text([_PING]))
        firsts = {"user": earlier[:1], "tool": observed[:1] or earlier[:1]}
        return {role: first[0] for role, first in firsts.items() if first and first[0] not in asking}

    def _behind(self, number: int, turns: int) -> str:
        """Text between that message and the next in a conversation of so many questions and answers; "" where the
        template refuses it."""
        try:
            parts = self.frame([_PING, _PONG] * turns, {number, number + 1}, ask=False)
        except BadRow:
            return ""
        return parts[-2] if number + 1 < 2 * turns and len(parts) > 2 else parts[-1]

    def _text(self, messages: Sequence[Message], *, ask: bool = False) -> str:
        """Render the messages to text, offering a tool if one is called; return "" where the template refuses them."""
        renderer = self
        if any(message.calls for message in messages):
            renderer = copy.copy(self)
            renderer._tools = PROBE_TOOLS
        try:
            return renderer.render(messages, ask=ask).text
        except BadRow:
            return ""

    def _specials_at_start(self, text: str) -> list[str]:
        found, at = [], 0
        while token := self._next_special.match(text, at):
            found.append(token[1])
            at = token.end()
        return found

    @cached_property
    def opening(self) -> str:
        """Text that a generation block writes although the prompt ends with it: a header, in SmolLM3's template."""
        try:
            prompt = self.render([_PING], ask=True).text
            spans = self.render([_PING, _PONG], ask=False).generated
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


def _calls_left_out(name: str | None) -> BadRow:
    what = f"leaves out the tool {name!r:.60}" if name else "escapes special tokens inside calls"
    return BadRow(
        f"this template {what}",
        reason="tools or calls left out by the template",
        hint="give a chat_template that shows tools and tool_calls, or leave such rows out",
    )
