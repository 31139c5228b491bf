"""Chat templates are programs from strangers: they run in Jinja's sandbox, with bounds on time and size.

Jinja has no unbounded loop, but bounded loops nest, macros recurse and texts double. Every pass of a loop and
every call of a macro goes through ``Bounds.tick``, and everything that can make a text or a number
large is checked before it is made. Nothing depends on signals, so rendering works in any thread.
"""

import json
import time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from fitune.errors import DataError

TIME_LIMIT_S = 2.0
"""One conversation takes well under a millisecond."""
SIZE_LIMIT = 64 * 1024**2
"""Characters a rendering, or any text inside it, may have."""

MARK_OPEN, MARK_CLOSE = "\ufdd0", "\ufdd1"
"""Stand around what a ``{% generation %}`` block wrote. formats.py keeps them out of the data."""

_PADDING_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "translate")
_PADDING_FILTERS = ("center", "format", "indent", "wordwrap")
_FAILURES = (
    jinja2.TemplateError, RecursionError, MemoryError,
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
)  # fmt: skip


class TemplateFailed(DataError):
    """The template refused the conversation, failed on it, or went out of bounds."""


class SafeTemplate:
    """A compiled chat template. Raises DataError when the source is no valid Jinja."""

    def __init__(self, source: str, *, name: str) -> None:
        self._environment = _Environment()
        self._name = name
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{name}, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise DataError(f"{name}: nested too deeply") from None

    @property
    def has_marks(self) -> bool:
        """Whether the template says, with ``{% generation %}``, what the model itself writes."""
        return self._environment.has_marks

    def render(self, **variables: Any) -> str:
        """The text, with MARK_OPEN and MARK_CLOSE around generation blocks. Raises TemplateFailed."""
        self._environment.bounds.start()
        try:
            return self._template.render(**variables)
        except _FAILURES as error:
            raise TemplateFailed(f"{self._name}: {error or type(error).__name__}") from None


class Bounds:
    """Of one rendering at a time. Time is the thread's own: a machine that is busy or stopped trips nothing."""

    def start(self) -> None:
        self._deadline = time.thread_time() + TIME_LIMIT_S
        self._written = 0

    @jinja2.pass_context
    def tick(self, _context: Any, _value: bool) -> bool:
        """Called on every pass of a loop; true, so that it can stand in a condition.

        Takes the context only because the compiler folds a filter of a constant that does not.
        """
        if time.thread_time() > self._deadline:
            raise jinja2.TemplateRuntimeError(f"still running after {TIME_LIMIT_S:g} s: an endless loop?")
        return True

    def written(self, value: Any) -> Any:
        """Called with everything a template writes."""
        text = value if isinstance(value, str) else str(value)
        self._written += len(text)
        require_size(self._written)
        return text

    def join(self, *parts: Any) -> str:
        """The ``~`` operator."""
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        require_size(sum(map(len, texts)))
        return "".join(texts)


def require_size(size: int) -> int:
    if size > SIZE_LIMIT:
        raise jinja2.TemplateRuntimeError(f"makes a text of more than {SIZE_LIMIT:,} characters")
    return size


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``: what the model itself writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        self.environment.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{MARK_OPEN}{caller()}{MARK_CLOSE}"


class _Bounding(NodeTransformer):
    """Puts a tick into every loop and macro, and sends ``~`` through the size check."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement())
        if node.test is not None:
            node.test = nodes.And(_filter("bounded_tick", nodes.Const(True)), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick_statement())
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("bounded_join", *node.nodes)


def _filter(name: str, value: nodes.Expr, *arguments: nodes.Expr) -> nodes.Filter:
    """A filter call is compiled to a plain call; a function call would cost ten times as much."""
    return nodes.Filter(value, name, list(arguments), [], None, None)


def _tick_statement() -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter("bounded_tick", nodes.Const(True)))


class _Environment(ImmutableSandboxedEnvironment):
    """What chat templates on the Hub expect to find: their globals, filters and whitespace rules."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.bounds, self.has_marks = Bounds(), False
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, loopcontrols],
            finalize=self.bounds.written,
        )
        self.bounds.start()  # constant expressions are computed while compiling
        for name in _PADDING_FILTERS:
            del self.filters[name]
        self.filters.update(bounded_tick=self.bounds.tick, bounded_join=self.bounds.join)
        self.filters.update(tojson=_to_json, replace=_replace, join=_join_filter(self.filters["join"]))
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_fixed_date)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Bounding().visit(tree).set_environment(self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        padding = isinstance(obj, str | bytes) and attr in _PADDING_METHODS
        return not padding and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            return _replace(owner, *args)
        if isinstance(owner, str) and name == "join" and args:
            parts = list(args[0])
            require_size(sum(map(len, parts)) + len(owner) * len(parts))
            return owner.join(parts)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if not isinstance(left, int | float):
                require_size(len(left) + len(right))
        elif isinstance(left, int | float) and isinstance(right, int | float):
            _require_small_number(operator, left, right)
        elif operator == "*":
            require_size(len(left) * right if isinstance(right, int) else left * len(right))
        else:
            raise jinja2.TemplateRuntimeError(f"{operator} is for numbers only")
        return super().call_binop(context, operator, left, right)


def _require_small_number(operator: str, left: float, right: float) -> None:
    if operator != "%" and (abs(left) > 2**63 or abs(right) > (64 if operator == "**" else 2**63)):
        raise jinja2.TemplateRuntimeError("makes a number that is too large")


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text, limit = str(text), -1 if count is None else count
    places = text.count(old) if limit < 0 else min(limit, len(text) + 1)
    require_size(len(text) + places * len(new))
    return text.replace(old, new, limit)


def _join_filter(original: Any) -> Any:
    @jinja2.pass_eval_context
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        parts = list(value)
        require_size(sum(len(part) for part in parts if isinstance(part, str)) + len(d) * len(parts))
        return original(context, parts, d, attribute)

    return join


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """JSON as it is; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=min(indent, 16) if indent else indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _fixed_date(format: str) -> str:
    """26 July 2024, the day that Llama's templates write when they know no date.

    Templates that print today's date would make every day's prompts differ from those trained on.
    """
    return time.strftime(format[:100], time.struct_time((2024, 7, 26, 12, 0, 0, 4, 208, 0)))
