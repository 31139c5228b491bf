"""JSON that others wrote, read within bounds, and frozen dataclasses to JSON and back.

``json.loads`` alone takes the last of two equal keys without a word, ends in a RecursionError for what is nested
deeply, and reads whatever size there is. Every ValueError of the reading is a cause in words; the caller adds the file.

Of dataclasses unions are told apart by a ``kind`` key holding the class name, enums by their value. Unknown and
missing keys are errors: a file that was edited by hand fails where it is wrong. pydantic's core reads, by a schema for
each class that is made on its first use. ``TypeAdapter`` would make the schema itself, but each of our dataclasses and
unions would have to carry pydantic's marks for ``kind``, strictness and NaN.
"""

import dataclasses
import enum
import functools
import inspect
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, SchemaValidator, ValidationError
from pydantic_core import core_schema as schema

from fitune.files import read_bytes
from fitune.units import MIB

CONFIG_BYTES = 8 * MIB
"""Largest config, plan, state or report: those in use have about one MiB at most (names of 20,000 classes)."""
TABLE_BYTES = 64 * MIB
"""Largest tokenizer or index of weights: Gemma-3's 262,144 tokens take 33 MiB, 280,000 tensors about 28 MiB."""

MOST_NESTING = 64
"""Levels of lists and objects: what copies, compares or prints a value goes one call deeper for each of them."""


def read_object(
    file: Path, *, largest_bytes: int = CONFIG_BYTES, follow_links: bool = True
) -> dict[str, Any]:
    """The object in ``file``. Raises OSError, and ValueError saying what is wrong with the content."""
    return parse_object(read_bytes(file, limit=largest_bytes, follow_links=follow_links))


def read_json(file: Path) -> Any:
    """Read the value in ``file``, which is no link. Raises OSError, and ValueError saying what is wrong with it."""
    return parse_json(read_bytes(file, limit=CONFIG_BYTES, follow_links=False))


def parse_object(data: bytes | str) -> dict[str, Any]:
    """The object that a JSON text holds, as by ``parse_json``."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def parse_json(data: bytes | str) -> Any:
    """The value that ``data`` spells. Raises ValueError with the line, the key or the place that is wrong."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _too_deep() from None
    require_shallow(value)
    _require_whole_characters(text, value)
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def require_shallow(value: Any) -> None:
    """Raises ValueError when lists and objects are nested more than MOST_NESTING deep."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MOST_NESTING:
            raise _too_deep()
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects nested more than {MOST_NESTING} deep")


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _require_whole_characters(text: str, value: Any) -> None:
    r"""``"\ud83d"`` alone is a string that cannot be written or printed."""
    if not _SURROGATE.search(text):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"contains an unpaired surrogate (U+{code:04X})") from None


T = TypeVar("T")

_NOT_FINITE = ("nan", "inf", "-inf")
_FLOAT_BITS = 1023
"""A whole number of more may be above the largest float."""


def to_data(value: Any) -> Any:
    """Plain dicts, lists, strings and numbers that ``json.dumps`` accepts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN; a loss that is one must still be readable
    if isinstance(value, Mapping):
        return {str(to_data(key)): to_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_data(item) for item in value]
    return value


def from_data(cls: type[T], data: Any) -> T:
    """Rebuild a ``cls`` from what ``to_data`` made. Raises ValueError naming the path that does not match."""
    validator: SchemaValidator = _validator(typing.cast(Any, cls))
    try:
        return typing.cast(T, validator.validate_python(data))
    except ValidationError as error:
        raise ValueError(_in_words(cls.__name__, error.errors(include_url=False)[0])) from None


def to_json(value: Any) -> str:
    """Returns the value as indented JSON."""
    return json.dumps(to_data(value), indent=2, ensure_ascii=False) + "\n"


def from_json(cls: type[T], text: str) -> T:
    """Returns the value of type ``cls`` that the JSON text holds."""
    return from_data(cls, parse_json(text))


@functools.cache
def _validator(hint: Any) -> SchemaValidator:
    return SchemaValidator(_schema(hint))


def _schema(hint: Any) -> CoreSchema:
    """Containers take what JSON has for them (a list for a tuple); numbers, strings and bools only themselves."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        chosen = _union_schema(
            [
                one
                for choice in args
                if choice is not types.NoneType
                # an abstract class says which classes it stands for
                for one in (choice.kinds() if inspect.isabstract(choice) else [choice])
            ]
        )
        return schema.nullable_schema(chosen) if types.NoneType in args else chosen
    if origin is typing.Literal:
        return schema.chain_schema([_PLAIN[type(args[0])], schema.literal_schema(list(args))])  # True is no 1
    if origin is tuple and args[-1] is Ellipsis:
        return schema.tuple_schema([_schema(args[0])], variadic_item_index=0, fail_fast=True)
    if origin is tuple:
        return schema.tuple_schema([_schema(item) for item in args])
    if origin is dict:
        return schema.dict_schema(_schema(args[0]), _schema(args[1]))
    if dataclasses.is_dataclass(hint):
        return _dataclass_schema(hint)
    if issubclass(hint, enum.Enum):
        return schema.enum_schema(hint, list(hint))
    return _PLAIN[hint]


def _union_schema(choices: list[Any]) -> CoreSchema:
    if len(choices) == 1:
        return _schema(choices[0])
    return schema.tagged_union_schema(
        {_tag(choice.__name__): _schema(choice) for choice in choices},
        discriminator=lambda data: _tag(_kind(data)),
        custom_error_type="kind",
        custom_error_message="is not one of " + ", ".join(choice.__name__ for choice in choices),
    )


def _kind(data: Any) -> Any:
    return data.get("kind") if isinstance(data, dict) else type(data).__name__


def _tag(kind: Any) -> str:
    """A choice in pydantic's paths, where no key of ours looks like this."""
    return f"<{kind}>"


def _dataclass_schema(cls: Any) -> CoreSchema:
    hints, names, fields = typing.get_type_hints(cls), [], []
    if "kind" not in hints:  # read and then forgotten
        kind = schema.with_default_schema(schema.literal_schema([cls.__name__]), default=cls.__name__)
        fields.append(schema.dataclass_field("kind", kind, kw_only=True, init_only=True))
    for field in dataclasses.fields(cls):
        value = _schema(hints[field.name])
        if field.default is not dataclasses.MISSING:
            value = schema.with_default_schema(value, default=field.default)
        elif field.default_factory is not dataclasses.MISSING:
            value = schema.with_default_schema(value, default_factory=field.default_factory)
        names.append(field.name)
        fields.append(schema.dataclass_field(field.name, value, kw_only=True))
    arguments = schema.dataclass_args_schema(
        cls.__name__, fields, collect_init_only=True, extra_behavior="forbid"
    )
    return schema.dataclass_schema(cls, arguments, names, slots=True)


def _number(data: Any) -> Any:
    if type(data) is str and data in _NOT_FINITE:
        return float(data)
    if type(data) is int and data.bit_length() > _FLOAT_BITS:
        raise PydanticCustomError("too_large", "a number below 1e308")
    return data


_PLAIN: dict[Any, CoreSchema] = {
    bool: schema.bool_schema(strict=True),
    int: schema.int_schema(strict=True),
    str: schema.str_schema(strict=True),
    float: schema.no_info_before_validator_function(_number, schema.float_schema(strict=True)),
}

_EXPECTED = {
    "bool_type": "bool", "int_type": "int", "float_type": "float", "string_type": "str",
    "dataclass_type": "an object", "dict_type": "an object", "tuple_type": "a list",
    "too_long": "fewer items",
}  # fmt: skip


def _in_words(name: str, error: ErrorDetails) -> str:
    """pydantic speaks to programmers; this is for who has edited a file."""
    keys = [key for key in error["loc"] if isinstance(key, int) or key[:1] not in ("<", "[")]
    path = [name, *(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)]
    kind, found = error["type"], error["input"]
    if kind in ("missing", "unexpected_keyword_argument"):
        fault = "missing" if kind == "missing" else "unknown"
        return f"{''.join(path[:-1])}: {fault} key {keys[-1]!r} (edited, or of another version of fitune)"
    if kind == "kind":
        return f"{''.join(path)}: kind {_kind(found)!r:.200} {error['msg']}"
    expected = _EXPECTED.get(kind) or error["msg"].removeprefix("Input should be ")
    return f"{''.join(path)}: expected {expected}, found {found!r:.200}"
