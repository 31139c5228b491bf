"""Relative paths of a recipe: those of its own folder where something is there, else of the folder the shell is in."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.files import is_there

Change = Callable[[str, str], str]
"""A key and its path -> the path to take."""


def with_own_paths(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Canonical keys of a recipe in ``folder``, its paths as the shell's folder sees them."""

    def own(name: str, path: str) -> str:
        """The path below ``folder`` if it is relative and something is there, else the path as it is."""
        is_relative = "://" not in path and not path.startswith(("/", "~"))
        return str(folder / path) if is_relative and _is_at(name, folder / path) else path

    return dict(keys) if folder.resolve() == Path.cwd() else with_paths(keys, own)


def require_model(model: str, folder: Path, *, where: str) -> None:
    """Raises RecipeError for the path of a model that is neither in the recipe's folder nor in the present one."""
    is_relative_path = (
        model.startswith("./")
        or model.startswith("../")
        or (model.count("/") > 1 and not model.startswith(("/", "~")) and "://" not in model)
    )
    if is_relative_path and not is_there(model) and folder.resolve() != Path.cwd():
        raise RecipeError(
            f"{where}: model = {model!r} is neither in the recipe's folder, {folder.resolve()}, nor in the present "
            f"one, {Path.cwd()}",
            hint="model: a path from the recipe's folder, or an absolute one",
        )


def with_absolute_paths(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a recipe that says the same in any folder."""

    def absolute(name: str, path: str) -> str:
        """The absolute path of what is here; a URL, a path from ``~`` and all else as it is."""
        is_here = "://" not in path and not path.startswith("~") and _is_at(name, Path(path))
        return os.path.abspath(path) if is_here else path

    return with_paths(keys, absolute)


def _is_at(name: str, path: Path) -> bool:
    """True if something is there; a model's name may also be that of a folder which is none."""
    return is_there(str(path)) and (name != "model" or path.is_file() or (path / "config.json").is_file())


def with_paths(keys: Mapping[str, Any], change: Change, *, also: Sequence[str] = ()) -> dict[str, Any]:
    """``keys`` with each path changed: of model, data and templates, and of the keys in ``also``."""

    def source(name: str, value: Any) -> Any:
        """The value with its path changed: a text, or a mapping with ``path``; any other value as it is."""
        if isinstance(value, str):
            return change(name, value)
        if isinstance(value, Mapping) and isinstance(value.get("path"), str):
            return {**value, "path": change(name, value["path"])}
        return value

    changed = dict(keys)
    for name in ("model", "data", "eval_data", "chat_template", "deepspeed", "resume", *also):
        if value := keys.get(name):
            several = isinstance(value, list)
            changed[name] = [source(name, one) for one in value] if several else source(name, value)
    return changed
