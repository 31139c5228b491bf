"""Strict YAML: a stranger may have written it. No tags, no aliases, no duplicate keys; errors name the line. And what
is read beside it: the JSON files that recipes name, and words of a command line, by the types of their keys."""

import re
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from fitune.errors import RecipeError
from fitune.files import read_text
from fitune.units import KIB, MIB
from fitune.values.serial import parse_object

_MOST_NESTING = 32
_MOST_DIGITS = 100
_MOST_RECIPE_BYTES = 256 * KIB
"""Two seconds of reading. The longest recipes here have two KiB."""
_MOST_JSON_BYTES = 4 * MIB


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses tags, duplicate keys and aliases (a few bytes of them can fill the memory)."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node. Raises an error for aliases, tags and deep nesting."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases (*name) are not allowed", event)
        if getattr(event, "tag", None) is not None:
            name = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise _refused(f"tags ({name}) are not allowed: write the value alone", event)
        self.depth += 1
        if self.depth > _MOST_NESTING:
            raise _refused(f"nested more than {_MOST_NESTING} deep", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Deep, so that whatever a value cannot be is raised here, where its line is known: 2024-99-99, 0x_."""
        try:
            return super().construct_object(node, deep=True)
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise _refused(f"{str(node.value)[:40]!r} cannot be read: {error}", node) from None

    def construct_yaml_int(self, node: Any) -> Any:
        """A whole number. Raises ValueError for ``010``, which YAML 1.1 takes for 8, and for one that is too long to be
        a float, or a text again."""
        text = str(self.construct_scalar(node))
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"a number of {len(text):,} characters, {_MOST_DIGITS} at most")
        value = super().construct_yaml_int(node)
        if re.fullmatch("[-+]?0[0-7_]+", text):
            raise ValueError(f"with a leading 0 YAML counts in eights and reads {value}; leave the 0 out")
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """A mapping. Raises an error with the line for a key that is no text or number, or stands twice."""
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):
                raise _refused(f"{key!r} is no key", key_node)
            line = key_node.start_mark.line + 1
            if key in first:
                raise _refused(
                    f"duplicate key {key!r}, first in line {first[key]}: keep one of them", key_node
                )
            first[key] = line
        return super().construct_mapping(node, deep)


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_yaml_int)


def _refused(why: str, place: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, why, place.start_mark)


_EXAMPLES = {
    "recipe": "model: …, data: …; `fitune init` writes one",
    "fleet": "clusters: [{name: a, gpu: h100, gpus: 8}]",
}
"""Kind of file -> how it begins."""

_MISSING = {
    "recipe": "look at the path; a model is named by --model, data by --data, and `fitune init` writes a recipe"
}


_DATA = {".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow"}
"""Ends of names that no recipe has."""


def load_yaml(path: Path, *, kind: str = "recipe") -> dict[str, Any]:
    """The keys and values of a file. Raises RecipeError for a file that is missing, unreadable or no mapping.

    ``kind`` names the file in messages: a recipe, a fleet, a judge.
    """
    if path.suffix.lower() in _DATA:
        raise RecipeError(f"{path} is data by its name, not a {kind}", hint=f"--data {path}")
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, not a {kind} file", hint=_MISSING.get(kind))
    try:
        text = read_text(path, limit=_MOST_RECIPE_BYTES, encoding="utf-8-sig", own_pipe=True)
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such {kind} file", hint=_MISSING.get(kind, "look at the path")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RecipeError(f"{path}: cannot be read: {cause}") from None
    return parse_mapping(text, where=str(path), kind=kind)


def load_json(path: Path, *, key: str) -> dict[str, Any]:
    """The object in a JSON file that ``key`` names. Raises RecipeError for one that is missing, unreadable or none."""
    try:
        return parse_object(read_text(path, limit=_MOST_JSON_BYTES, encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RecipeError(f"{key}: {path}: cannot be read: {cause}", hint="mend that file") from None


def parse_mapping(text: str, *, where: str, kind: str) -> dict[str, Any]:
    """The keys and values of a file of that ``kind``. Raises RecipeError with the line."""
    value = parse_value(text, where=where)
    if not isinstance(value, dict):
        found = "and this file is empty" if value is None else f"found {type(value).__name__}"
        raise RecipeError(
            f"{where}: a {kind} is a list of `key: value` lines, {found}", hint=_EXAMPLES.get(kind)
        )
    return value


def parse_value(text: str, *, where: str) -> Any:
    """One YAML value, read safely. Raises RecipeError with the line."""
    try:
        return yaml.load(text, Loader=StrictLoader)  # StrictLoader is a SafeLoader
    except yaml.YAMLError as error:
        cause, hint = getattr(error, "problem", None) or str(error), None
        if isinstance(error, yaml.reader.ReaderError):
            cause = f"the character U+{error.character:04X} is not allowed"
        if "'\\t'" in cause:
            cause, hint = "a tab, where YAML takes spaces alone", "replace each tab by two spaces"
        if cause == "but found another document":
            cause, hint = (
                "a second document begins here, and one is read",
                "a file for each, without the line ---",
            )
        raise RecipeError(f"{where}{_place(error, text)}: {cause}", hint=hint) from None


def _place(error: yaml.YAMLError, text: str) -> str:
    """``:line:column``, from 1."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        return f":{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"


def typed_value(annotation: Any, text: str, *, where: str) -> Any:
    """``text`` as it is for a key that takes a text: YAML would end ``run #3`` at the #, and read 007, dates and ``no``
    as other things. Where a list, a mapping or a switch may stand as well, those are read. Other keys are YAML.

    Raises RecipeError.
    """
    kinds = set(kinds_of(annotation))
    if not any(isinstance(kind, type) and issubclass(kind, str | BaseModel) for kind in kinds):
        return parse_value(text, where=where)
    if NoneType in kinds and text in ("", "null"):
        return None
    if kinds <= {str, NoneType} or not (text.lstrip().startswith(("[", "{")) or bool in kinds):
        return text
    try:
        value = parse_value(text, where=where)
    except RecipeError:
        return text
    return value if isinstance(value, list | dict | bool) or text in ("0", "1") else text


def kinds_of(annotation: Any) -> tuple[Any, ...]:
    """``bool`` -> (bool,); ``bool | str`` -> (bool, str); ``list[str]`` -> (list, str)."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds_of(parts[0])
    containers = (origin,) if origin in (list, dict) else ()
    inside = tuple(kind for part in parts for kind in kinds_of(part)) if parts else (annotation,)
    return (*containers, *inside)


def type_inside(annotation: Any, key: str) -> Any:
    """Type of what is at ``key`` in a value: a field, an entry of a mapping, or an index of a list, which may be left
    out where the list has one element."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_inside(parts[0], key)
    if origin is dict:
        return parts[1]
    if origin is list:
        return parts[0] if key.isdecimal() else type_inside(parts[0], key)
    fields = getattr(annotation, "model_fields", {})
    return fields[key].annotation if key in fields else Any
