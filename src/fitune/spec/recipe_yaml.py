"""YAML that a stranger may have written: no tags, no aliases, no duplicate keys, errors with a line."""

from pathlib import Path
from typing import Any

import yaml

from fitune.errors import RecipeError
from fitune.spec.disk import read_text
from fitune.units import MIB

MAX_RECIPE_BYTES = MIB


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and aliases (a few bytes of them can fill the memory)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            place = self.peek_event()  # type: ignore[no-untyped-call]
            raise _refused("aliases (*name) are not allowed", place)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):
                raise _refused(f"{key!r} is no key", key_node)
            if key in seen:
                raise _refused(f"duplicate key {key!r}", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refused(why: str, place: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, why, place.start_mark)


def load_yaml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, limit=MAX_RECIPE_BYTES, encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RecipeError(f"{path}: cannot be read: {cause}") from None
    value = parse_value(text, where=str(path))
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: a recipe is a list of `key: value` lines, found {type(value).__name__}")
    return value


def parse_value(text: str, *, where: str) -> Any:
    """One YAML value, read safely. Raises RecipeError with the line."""
    try:
        return yaml.load(text, Loader=StrictLoader)  # StrictLoader is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{where}{place}: {getattr(error, 'problem', None) or error}") from None
    except ValueError as error:  # a number of thousands of digits
        raise RecipeError(f"{where}: {error}") from None
    except RecursionError:
        raise RecipeError(f"{where}: nested too deeply") from None
