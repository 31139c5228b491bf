"""Regular expressions of a recipe, matched in bounded time and memory.

Python's ``re`` has no limit: ``(a+)+$`` against a name of forty letters takes longer than a training. The ``regex``
library has one for matching and none for compiling, where ``x{2147483647}`` and repeats inside repeats take gigabytes.
So an expression is measured first, and then matched against the clock of the processor: other work does not count.
"""

import re
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

_parser: Any = import_module("re._parser")  # the tree that re itself compiles from

MOST_LETTERS = 4_000
MOST_PARTS = 20_000
"""Parts of an expression with its repeats written out, each counted twice."""
SECONDS = 0.5
"""Processor time of all matches of one ``Clock`` together."""


@dataclass(slots=True)
class Clock:
    """Processor seconds left for a set of matches."""

    left: float = SECONDS
    _compiled: dict[str, Any] = field(default_factory=dict)

    def fullmatch(self, expression: str, text: str) -> Any:
        """The match of all of ``text`` as ``re.fullmatch`` finds it, or None.

        Raises ValueError saying why an expression cannot be used: it is none, too large, or too slow.
        """
        return self._timed("fullmatch", expression, text)

    def match(self, expression: str, text: str) -> Any:
        """Match the beginning of ``text``, as ``re.match`` does."""
        return self._timed("match", expression, text)

    def _timed(self, how: str, expression: str, text: str) -> Any:
        import_module("regex")  # not part of the match: from a slow disk it takes longer
        began = time.thread_time()
        try:
            if expression not in self._compiled:
                self._compiled[expression] = _compiled(expression)
            if self.left <= 0:
                raise TimeoutError
            return getattr(self._compiled[expression], how)(text, timeout=self.left)
        except (TimeoutError, MemoryError):
            self.left = 0.0
            raise ValueError(
                f"{_short(expression)} takes more than {SECONDS:g} s to match: repeats inside repeats go back too often"
            ) from None
        finally:
            self.left -= time.thread_time() - began


def _compiled(expression: str) -> Any:
    if len(expression) > MOST_LETTERS:
        raise ValueError(
            f"{_short(expression)} has {len(expression):,} letters, {MOST_LETTERS:,} are allowed"
        )
    try:
        re.compile(expression)
        parts = _parts(_parser.parse(expression))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{_short(expression)} is no regular expression: {error}") from None
    if parts > MOST_PARTS:
        raise ValueError(
            f"{_short(expression)} repeats too much: written out it has more than {MOST_PARTS:,} parts"
        )
    import regex  # for expressions alone: most recipes have none

    return regex.compile(expression)


def _parts(tree: Any) -> int:
    """Size of a parsed expression with its repeats written out, as far as ``MOST_PARTS`` needs to know."""
    total = 0
    for operator, operand in tree:
        inner = 1 + sum(_parts(part) for part in _inner(operand))
        if operator in _REPEATS:
            least, most = operand[0], operand[1]
            inner *= 2 * max(1, least if most == _parser.MAXREPEAT else most)
        total += inner
    return total


_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)


def _inner(operand: Any) -> list[Any]:
    """Expressions inside an operand: of a group, of a repeat, of each side of an alternative."""
    if isinstance(operand, _parser.SubPattern):
        return [operand]
    if isinstance(operand, tuple | list):
        return [part for item in operand for part in _inner(item)]
    return []


def _short(expression: str) -> str:
    return repr(expression if len(expression) <= 60 else expression[:57] + "…")
