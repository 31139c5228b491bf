"""Chat templates in a sandbox: Jinja with what templates on the Hub expect.

They are programs from strangers: they are compiled and run in Jinja's sandbox, which keeps them from Python's
internals. It does not bound time or memory: there are many ways in Jinja to make a text of gigabytes, or to compute for
hours inside one call. So this runs in a process with limits (template_process.py), never in the one that trains.
"""

import json
import time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fitune.errors import DataError

SIZE_LIMIT = 32 * 1024**2
"""Characters a rendering may have."""

MARK_OPEN, MARK_CLOSE = "\ufdd0", "\ufdd1"
"""Stand around what a ``{% generation %}`` block wrote. formats.py keeps them out of the data."""

_FAILURES = (
    jinja2.TemplateError, RecursionError,
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
)  # fmt: skip


class TemplateFailed(DataError):
    """The template refused the conversation, or failed on it."""


class SafeTemplate:
    """A compiled chat template. Raises DataError when the source is no valid Jinja."""

    def __init__(self, source: str, *, name: str) -> None:
        self._environment = _Environment()
        self._name = name
        try:
            self._template = self._environment.from_string(source)
            # as Jinja has them, copying them takes half the time of a rendering
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{name}, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise DataError(f"{name}: nested too deeply") from None
        except _FAILURES as error:
            raise DataError(f"{name}: {error}") from None

    @property
    def has_marks(self) -> bool:
        """True if the template says, with ``{% generation %}``, what the model itself writes."""
        return self._environment.has_marks

    def render(self, **variables: Any) -> str:
        """The text, with MARK_OPEN and MARK_CLOSE around generation blocks. Raises TemplateFailed."""
        try:
            text = self._template.render(**variables)
        except _FAILURES as error:
            raise TemplateFailed(f"{self._name}: {error or type(error).__name__}") from None
        if len(text) > SIZE_LIMIT:
            raise TemplateFailed(f"{self._name}: makes a text of more than {SIZE_LIMIT:,} characters")
        if not text.isascii() and (found := _unpaired_surrogate(text)):
            raise TemplateFailed(f"{self._name}: writes an unpaired surrogate (U+{ord(found):04X})")
        return text


def _unpaired_surrogate(text: str) -> str:
    """A surrogate without its other half, which no tokenizer can encode; "" when there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return ""


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``: what the model itself writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        environment: Any = self.environment  # ours says whether a template marks answers
        environment.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{MARK_OPEN}{caller()}{MARK_CLOSE}"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates on the Hub expect: their globals, filters and whitespace rules."""

    def __init__(self) -> None:
        self.has_marks = False
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        del self.filters["random"]  # the same conversation must always read the same
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_fixed_date)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _fixed_date(format: str) -> str:
    """26 July 2024, the day that Llama's templates write when they know no date.

    Templates that print today's date would make every day's prompts differ from those trained on.
    """
    return time.strftime(format[:100], time.struct_time((2024, 7, 26, 12, 0, 0, 4, 208, 0)))
