"""Text that a chat template wrote, and where in it are generation blocks and special-token text of the data."""

import re
from dataclasses import dataclass

from fitune.data.conversations.sandbox import MARK_CLOSE, MARK_OPEN

SHIELD = "\ufdd2"
"""Put inside special-token text of the content, so that the template's own special tokens can be told from it."""
MARKS = re.compile(f"[{MARK_OPEN}{MARK_CLOSE}{SHIELD}]")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text without marks. Places count its characters; ``shielded`` are starts of special-token text in content."""

    text: str
    generated: tuple[tuple[int, int], ...]
    shielded: frozenset[int]


def without_marks(marked: str) -> Rendered | None:
    """Take the marks out and say where they stood. None when they do not come in pairs."""
    if marked.isascii():
        return Rendered(marked, (), frozenset())
    opened: list[int] = []
    generated: list[tuple[int, int]] = []
    shielded: set[int] = set()
    parts: list[str] = []
    length = at = 0
    for mark in MARKS.finditer(marked):
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


def joined(prompt: Rendered, between: Rendered, whole: Rendered, begin: int) -> Rendered:
    """``prompt``, then ``between``, then what is in ``whole`` from ``begin`` on."""
    middle = len(prompt.text)
    later = middle + len(between.text) - begin
    return Rendered(
        prompt.text + between.text + whole.text[begin:],
        (*prompt.generated, *((max(a, begin) + later, b + later) for a, b in whole.generated if b > begin)),
        prompt.shielded
        | {place + middle for place in between.shielded}
        | {place + later for place in whole.shielded if place >= begin},
    )
