"""Frozen dataclasses to JSON and back.

Unions are told apart by a ``kind`` key holding the class name, enums by their value. Unknown and
missing keys are errors: a file that was edited by hand fails where it is wrong.
"""

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from fitune.spec.strict_json import parse_json

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
    return typing.cast(T, _build(cls, data, path=cls.__name__))


def to_json(value: Any) -> str:
    return json.dumps(to_data(value), indent=2, ensure_ascii=False) + "\n"


def from_json(cls: type[T], text: str) -> T:
    return from_data(cls, parse_json(text))


def _build(hint: Any, data: Any, *, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _build_union(args, data, path=path)
    if origin is typing.Literal:
        if data not in args:
            raise ValueError(f"{path}: {data!r} is not one of {', '.join(map(repr, args))}")
        return data
    if origin is tuple:
        return _build_tuple(args, data, path=path)
    if origin is dict:
        _require(isinstance(data, dict), path, "an object", data)
        return {
            _build(args[0], k, path=path): _build(args[1], v, path=f"{path}.{k}") for k, v in data.items()
        }
    if dataclasses.is_dataclass(hint):
        return _build_dataclass(hint, data, path=path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    if hint is float and (data in _NOT_FINITE or type(data) is int):
        _require(
            type(data) is str or data.bit_length() <= _FLOAT_BITS,
            path,
            "a number",
            "an integer too large for one",
        )
        return float(data)
    _require(type(data) is hint, path, hint.__name__, data)
    return data


def _build_union(choices: tuple[Any, ...], data: Any, *, path: str) -> Any:
    if data is None and types.NoneType in choices:
        return None
    choices = tuple(choice for choice in choices if choice is not types.NoneType)
    if len(choices) == 1:
        return _build(choices[0], data, path=path)
    kind = data.get("kind") if isinstance(data, dict) else None
    for choice in choices:
        if choice.__name__ == kind:
            return _build(choice, data, path=path)
    raise ValueError(f"{path}: kind {kind!r} is not one of {', '.join(c.__name__ for c in choices)}")


def _build_tuple(args: tuple[Any, ...], data: Any, *, path: str) -> tuple[Any, ...]:
    _require(isinstance(data, list), path, "a list", data)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(args[0], item, path=f"{path}[{i}]") for i, item in enumerate(data))
    _require(len(data) == len(args), path, f"{len(args)} items", data)
    return tuple(
        _build(arg, item, path=f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True))
    )


def _build_dataclass(cls: Any, data: Any, *, path: str) -> Any:
    _require(isinstance(data, dict), path, "an object", data)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if "kind" in data and "kind" not in fields:
        _require(data["kind"] == cls.__name__, f"{path}.kind", repr(cls.__name__), data["kind"])
    unknown = set(data) - set(fields) - {"kind"}
    if unknown:
        raise ValueError(f"{path}: unknown key {sorted(unknown)[0]!r}")
    optional = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        name for name, f in fields.items() if name not in data and (f.default, f.default_factory) == optional
    ]
    if missing:
        raise ValueError(f"{path}: missing key {missing[0]!r}")
    return cls(
        **{name: _build(hints[name], data[name], path=f"{path}.{name}") for name in fields if name in data}
    )


def _require(condition: bool, path: str, expected: str, data: Any) -> None:
    if not condition:
        raise ValueError(f"{path}: expected {expected}, found {data!r}")
