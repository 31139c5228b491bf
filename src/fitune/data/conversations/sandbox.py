"""Chat templates in a sandbox. They are programs from strangers: transformers' own environment keeps them from Python's
internals, and what it is given here is plain text, lists and dicts.

Time and memory have no limit: Ctrl-C ends an endless template.
"""

import re
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension

from fitune.errors import DataError

MARK_OPEN, MARK_CLOSE = "\ufdd0", "\ufdd1"
"""Stand around what a ``{% generation %}`` block wrote. formats.py keeps them out of the data."""


class TemplateFailed(DataError):
    """The template refused the conversation, or failed on it."""


class SafeTemplate:
    """A compiled chat template. Raises DataError when the source is no valid Jinja."""

    def __init__(self, source: str, *, name: str) -> None:
        self._name = name
        try:
            self._environment, self._template = _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{name}, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise DataError(f"{name}: nested too deeply") from None
        except (
            Exception
        ) as error:  # compiling runs the template's constant expressions, which may raise anything
            raise DataError(f"{name}: {str(error) or type(error).__name__}") from None

    @property
    def has_marks(self) -> bool:
        """True if the template says, with ``{% generation %}``, what the model itself writes."""
        return bool(self._environment.has_marks)

    def render(self, **variables: Any) -> str:
        """The text, with MARK_OPEN and MARK_CLOSE around generation blocks. Raises TemplateFailed."""
        try:
            text: str = self._template.render(**variables)
        except Exception as error:  # a template may raise anything, and is to be named with it
            raise TemplateFailed(f"{self._name}: {str(error) or type(error).__name__}") from None
        try:
            text.encode()
        except UnicodeEncodeError as error:  # no tokenizer can encode it
            found = f"U+{ord(text[error.start]):04X}"
            raise TemplateFailed(f"{self._name}: writes an unpaired surrogate ({found})") from None
        return text


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``: what the model itself writes."""

    tags = {"generation"}  # noqa: RUF012
    priority = 101
    """Above transformers' block of the same name, which notes places instead: the last one of a tag is used."""

    def parse(self, parser: Any) -> nodes.Node:
        """The block as a call of ``_mark`` around its body; notes that the template marks answers."""
        environment: Any = self.environment  # ours says whether a template marks answers
        environment.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{MARK_OPEN}{caller()}{MARK_CLOSE}"


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[Any, Any]:
    """The sandbox and the template in it: a run asks for the same one again and again."""
    environment = _environment()
    template = environment.from_string(source)
    # as Jinja has them, copying them takes half the time of a rendering
    template.globals = dict(template.globals)
    return environment, template


def _environment() -> Any:
    """The sandbox in which transformers renders chat templates, without what differs from one rendering to the next:
    the same conversation must always read the same. An overlay shares its tables with the original: copied here.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment: Any = _compile_jinja_template("").environment.overlay(extensions=[_GenerationBlock])
    environment.filters = {name: of for name, of in environment.filters.items() if name != "random"}
    environment.globals = {name: of for name, of in environment.globals.items() if name != "lipsum"}
    environment.globals["strftime_now"] = _fixed_date
    environment.has_marks = False
    return environment


def _fixed_date(format: str) -> str:
    """26 July 2024, the day that Llama's templates write when they know no date.

    Templates that print today's date would make every day's prompts differ from those trained on.
    """
    return time.strftime(format, time.struct_time((2024, 7, 26, 12, 0, 0, 4, 208, 0)))


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
