"""A recipe from wherever it comes: a file of fitune's or of another trainer, options of a command, Python's keywords.

Every key of a recipe is also an option: ``--seq-len 4096``, ``--learning_rate=1e-4``, ``--lora-r 32``.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fitune.errors import RecipeError
from fitune.recipe.aliases import ALIASES, SWITCHES, VALUE_ALIASES
from fitune.recipe.paths import require_model, with_own_paths
from fitune.recipe.recipe import (
    Recipe,
    SourceRecipe,
    canonical_keys,
    given_keys,
    layered_recipe,
    parse_recipe,
)
from fitune.recipe.strict_yaml import kinds_of, load_yaml, typed_value
from fitune.recipe.types import as_sources
from fitune.units import wrapped

if TYPE_CHECKING:
    from fitune.session.recipes.keywords import RecipeLike

logger = logging.getLogger(__name__)

_REPEATABLE = {"data", "eval_data", "columns"}
"""``--data a.jsonl --data b.jsonl`` are two sources."""

_YES_AND_NO = ("true", "false", "yes", "no", "on", "off", "1", "0")


OnNote = Callable[[str], object]
"""Told a line for people about how another trainer's keys were read."""


def recipe_from(words: Sequence[str], settings: Sequence[str], *, on_note: OnNote = lambda _: None) -> Recipe:
    """A recipe file, of fitune or another trainer, and ``--key value`` pairs, in any order."""
    path, options = split_words(words)
    return read_any_recipe(path, settings=settings, options=options, on_note=on_note)


def matrix_recipe(words: Sequence[str], settings: Sequence[str], *, model: str) -> Recipe:
    """The pins of all cells; what varies from cell to cell may not be pinned."""
    path, options = split_words(words)
    for name, instead in (("model", "--models"), ("seq_len", "--context")):
        if name in canonical_keys(options, where="the options"):
            raise RecipeError(
                f"{name} differs from cell to cell of a matrix, so it cannot be set for all",
                hint=f"{instead} alone",
            )
    return read_any_recipe(path, settings=settings, options={**options, "model": model})


def read_any_recipe(
    path: Path | None, *, settings: Iterable[str] = (), options: Mapping[str, Any] | None = None,
    on_note: OnNote = lambda _: None,
) -> Recipe:  # fmt: skip
    """A YAML file of fitune or of another trainer, then ``a.b=c`` settings, then options; the later wins.

    Raises RecipeError that lists every key that is unknown or would change the result.
    """
    options = {name: value for name, value in (options or {}).items() if value is not None}  # the file's stay
    if path is None:
        return layered_recipe({}, where="the command line", settings=settings, options=options)
    return recipe_of_keys(
        load_yaml(path), where=str(path), folder=path.parent, settings=settings, options=options, on_note=on_note
    )  # fmt: skip


def recipe_of(recipe: "RecipeLike | None", settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a YAML file, of a mapping like one, or one that was read already, with ``settings`` on top.

    A recipe of another trainer is understood as in a file; what became of its keys is logged. Raises RecipeError.
    """
    asked = canonical_keys(_plain(settings), where="the keywords")
    if isinstance(recipe, Recipe):
        return parse_recipe({**given_keys(recipe), **asked}, where="the recipe")
    if recipe is None:
        return parse_recipe(asked, where="the keywords")
    if isinstance(recipe, Mapping):
        raw, where, folder = _plain(recipe), "the recipe", Path(".")
    elif isinstance(recipe, str | os.PathLike):
        raw, where, folder = load_yaml(Path(recipe)), str(recipe), Path(recipe).parent
    else:
        raise RecipeError(
            f"a recipe cannot be read from {recipe!r}", hint="a path, a mapping, keywords, or a Recipe"
        )
    return recipe_of_keys(raw, where=where, folder=folder, options=asked, on_note=logger.info)


def _plain(value: Any) -> Any:
    """Values as YAML has them: paths are texts, sequences are lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def recipe_of_keys(
    raw: Mapping[str, Any], *, where: str, folder: Path, settings: Iterable[str] = (),
    options: Mapping[str, Any] | None = None, on_note: OnNote = lambda _: None,
) -> Recipe:  # fmt: skip
    """The recipe of the keys of a file in ``folder``, with settings and options on top."""
    from fitune.recipe.foreign import read_foreign  # a recipe of options alone is no other trainer's

    settings, reading = tuple(settings), read_foreign(raw, where=where, folder=folder)

    def layered(keys: Mapping[str, Any]) -> Recipe:
        """The recipe of ``keys`` with settings and options on top. Raises RecipeError."""
        own = with_own_paths(keys, folder)
        return layered_recipe(own, where=where, settings=settings, options=options)

    if reading is None:
        recipe = layered(canonical_keys(raw, where=where))
        require_model(recipe.model, folder, where=where)
        return recipe
    from fitune.recipe.foreign.reading import SHARDING, explain_reading, require_readable, without_data

    require_readable(reading, own_data="data" in canonical_keys(options or {}, where="the options"))
    recipe, notes = layered(reading.settings), explain_reading(reading)
    divided = [name for name in SHARDING if name in reading.settings]
    if (recipe.gpus or 1) * recipe.nodes == 1 and divided:
        recipe = layered({name: value for name, value in reading.settings.items() if name not in divided})
        notes.append(f"  left to the plan on one device: {', '.join(divided)} (gpus: N divides the model)")
    if not recipe.data and (said := without_data(reading)):
        notes.append(wrapped(said, hanging=2))
    for line in notes:
        on_note(line)
    return recipe


def convert_recipe(path: Path) -> tuple[str, dict[str, Any]]:
    """Another trainer's recipe as one of fitune's: with a comment on each line, and as data with what was not taken
    over. Raises RecipeError for one of ours."""
    from fitune.recipe.foreign import read_foreign
    from fitune.recipe.foreign.reading import NO_NEWS, recipe_with_comments, require_readable

    reading = read_foreign(load_yaml(path), where=str(path), folder=path.parent)
    if reading is None:
        raise RecipeError(
            f"{path} is not recognised as another trainer's recipe", hint=f"fitune plan {quote(str(path))}"
        )
    require_readable(reading)
    recipe = layered_recipe(reading.settings, where=reading.where)
    values = recipe.model_dump(include=set(reading.settings), exclude_none=True)
    usual = {name: field.default for name, field in SourceRecipe.model_fields.items()}
    for name in values.keys() & {"data", "eval_data"}:  # without what a source has by default
        values[name] = [{k: v for k, v in each.items() if usual[k] != v} for each in values[name]]
    passed = {line.key: line.said or NO_NEWS for line in reading.of("passed")}
    data = {"trainer": reading.trainer, "recipe": values, "not_taken_over": passed}
    return recipe_with_comments(reading, values).removesuffix("\n"), data


def split_words(words: Sequence[str]) -> tuple[Path | None, dict[str, Any]]:
    """The one word that is no option is the recipe's path. An option without a value is a switch turned on.

    Raises RecipeError for a second path or an option given twice.
    """
    path: Path | None = None
    options: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if path is not None:
                raise RecipeError(
                    f"two recipes are named: {path} and {word}", hint="put values after their --key"
                )
            path = Path(word)
            continue
        key, equals, value = word.lstrip("-").partition("=")
        name = key.replace("-", "_")
        own = ALIASES.get(name, name)
        field = None if name in SWITCHES else Recipe.model_fields.get(own)
        kind = (
            Any if field is None else field.annotation
        )  # of another trainer's switch, or a key nobody knows
        kinds = (bool, str) if name in SWITCHES else kinds_of(kind)
        if not equals and rest and _is_value(rest[0], kinds):
            value = rest.pop(0)
        elif not equals:
            if not (Any in kinds or bool in kinds or "true" in VALUE_ALIASES.get(own, {})):
                raise RecipeError(f"--{key} has no value", hint=f"--{key} VALUE")
            value = "true"
        if name in options and own not in _REPEATABLE:
            hint = f"--{key} A,B names both" if list in kinds else "keep one of them"
            raise RecipeError(f"--{key} is given twice", hint=hint)
        typed = typed_value(kind, value, where=word)
        options[name] = [*as_sources(options[name]), *as_sources(typed)] if name in options else typed
    return path, options


def _is_value(word: str, kinds: Sequence[Any]) -> bool:
    """True if ``word`` is the value of the option before it: a switch needs none, so a recipe after it is a recipe."""
    if word.startswith("--"):
        return False
    if set(kinds) == {bool}:
        return word.lower() in _YES_AND_NO
    return bool not in kinds or not word.lower().endswith((".yaml", ".yml"))
