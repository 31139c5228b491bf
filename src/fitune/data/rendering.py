"""A conversation as the template writes it, with every place accounted for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fitune.data.encoding import Piece
from fitune.data.formats import Message
from fitune.data.rows import BadRow
from fitune.data.sandbox import MARK_CLOSE, MARK_OPEN, SafeTemplate, TemplateFailed

_SHIELD = "\ufdd2"
"""Put inside special-token text of the content, so that the template's own special tokens can be told from it."""
_MARKS = re.compile(f"[{MARK_OPEN}{MARK_CLOSE}{_SHIELD}]")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text without marks. Places count its characters; ``shielded`` are starts of special-token text in content."""

    text: str
    generated: tuple[tuple[int, int], ...]
    shielded: frozenset[int]


class Renderer:
    """Renders messages and cuts the result into pieces for the tokenizer."""

    def __init__(
        self, template: SafeTemplate, specials: dict[str, str], special_pattern: re.Pattern[str]
    ) -> None:
        self._template, self._specials, self._special_pattern = template, specials, special_pattern
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
        return _without_marks(marked)

    def _shield(self, content: str) -> str:
        return self._special_pattern.sub(lambda found: found[0][0] + _SHIELD + found[0][1:], content)

    def through_end_token(self, text: str, end: int) -> int:
        """Where the special token ends that follows at ``end``, white space between allowed; -1 when none follows."""
        while end < len(text) and text[end].isspace():
            end += 1
        found = self._special_pattern.match(text, end)
        return found.end() if found else -1

    def pieces(self, rendered: Rendered, start: int, end: int, *, supervised: bool) -> list[Piece]:
        """The text from ``start`` to ``end``, split only where special-token text has to stay plain."""
        cuts = [(start, end, False)]
        if any(start <= place < end for place in rendered.shielded):
            cuts = self._shielded_cuts(rendered, start, end)
        return [
            Piece(rendered.text[a:b], supervised=supervised, plain=plain, first=a == 0)
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


def _without_marks(marked: str) -> Rendered:
    """Take the marks out and say where they stood."""
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
            generated.append((opened.pop(), length))
        else:
            shielded.add(length - 1)
    return Rendered("".join([*parts, marked[at:]]), tuple(generated), frozenset(shielded))


def _refusal(turns: list[dict[str, str]], error: TemplateFailed, where: str) -> BadRow:
    if turns and turns[0]["role"] == "system" and "system" in error.message.lower():
        return BadRow(
            f"{where}: this template does not support a system message: {error.message}",
            reason="system message not supported by the template",
            hint="leave the system message out, or give a chat_template that has a place for it",
        )
    return BadRow(f"{where}: the template failed: {error.message}", reason="refused by the template")
