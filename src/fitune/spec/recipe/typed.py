"""A word of the command line as the value of a key: the key's own type says whether it is a text or YAML."""

from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from fitune.errors import RecipeError
from fitune.spec.recipe.strict_yaml import parse_value


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
