"""A conversation as the template writes it, with every place accounted for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fitune.data.encoding import Piece
from fitune.data.formats import Message
from fitune.data.rows import BadRow
from fitune.data.sandbox import MARK_CLOSE, MARK_OPEN, SafeTemplate, TemplateFailed

_SHIELD = "\ufdd2"
"""Put inside special-token text of the content, so that the template's own special tokens can be told from it."""
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
        any_special = "|".join(map(re.escape, special_texts)) or r"(?!)"
        self._special_pattern = re.compile(any_special)
        self._next_special = re.compile(rf"\s*({any_special})")
        self.has_marks = template.has_marks

    def render(self, messages: Iterable[Message], *, ask: bool, where: str) -> Rendered:
        """``ask`` adds the words after which the model answers. Raises BadRow when the template refuses."""
        turns = [{"role": message.role, "content": self._shield(message.content)} for message in messages]
        try:
            marked = self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=ask, **self._specials
            )
        except TemplateFailed as error:
            raise _refusal(turns, error, where) from None
        if (rendered := _without_marks(marked)) is None:
            raise BadRow(
                f"{where}: the template moves or cuts the text of its generation blocks",
                reason="generation blocks not found in the template's text",
                hint="put {% generation %}…{% endgeneration %} around text as it is written",
            )
        return rendered

    def _shield(self, content: str) -> str:
        return self._special_pattern.sub(lambda found: found[0][0] + _SHIELD + found[0][1:], content)

    def frame(
        self, messages: Sequence[Message], replaced: dict[int, str], *, ask: bool, where: str
    ) -> list[str]:
        """The text around the messages numbered in ``replaced``: one part before each, one after the last.

        The template sees a stand-in there, behind the text that is given for it.
        """
        standins = [
            Message(message.role, f"{replaced[number]}{_STANDIN}{number}{_STANDIN}")
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
        """Where the token ends that follows at ``end`` and ends an answer, perhaps behind white space; else ``end``."""
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


def _refusal(turns: list[dict[str, str]], error: TemplateFailed, where: str) -> BadRow:
    if turns and turns[0]["role"] == "system" and "system" in error.message.lower():
        return BadRow(
            f"{where}: this template does not support a system message: {error.message}",
            reason="system message not supported by the template",
            hint="leave the system message out, or give a chat_template that has a place for it",
        )
    return BadRow(f"{where}: the template failed: {error.message}", reason="refused by the template")
