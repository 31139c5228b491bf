"""Every key of a recipe is also an option: ``--seq-len 4096``, ``--learning_rate=1e-4``, ``--lora-r 32``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fitune.errors import RecipeError
from fitune.session.recipes.foreign_recipes import ReadRecipe, read_any_recipe
from fitune.spec.recipe.aliases import ALIASES, SWITCHES, VALUE_ALIASES
from fitune.spec.recipe.recipe import Recipe, canonical_keys
from fitune.spec.recipe.typed import kinds_of, typed_value
from fitune.spec.recipe.values import as_sources

_REPEATABLE = {"data", "eval_data", "columns"}
"""``--data a.jsonl --data b.jsonl`` are two sources."""

_YES_AND_NO = ("true", "false", "yes", "no", "on", "off", "1", "0")


def recipe_from(words: Sequence[str], settings: Sequence[str]) -> ReadRecipe:
    """A recipe file, of fitune or another trainer, and ``--key value`` pairs, in any order."""
    path, options = split_words(words)
    return read_any_recipe(path, settings=settings, options=options)


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
        if not equals and not (rest and _is_value_of(name, rest[0])):
            if not _may_be_a_switch(name):
                raise RecipeError(f"--{key} has no value", hint=f"--{key} VALUE")
            value = "true"
        elif not equals:
            value = rest.pop(0)
        if name in options and ALIASES.get(name, name) not in _REPEATABLE:
            raise RecipeError(f"--{key} is given twice", hint="keep one of them")
        typed = typed_value(_type_of(name), value, where=word)
        options[name] = [*as_sources(options[name]), *as_sources(typed)] if name in options else typed
    return path, options


def _type_of(name: str) -> Any:
    """Type of the key that is typed as ``--name``; a switch of another trainer, or a key that nobody knows, is any."""
    field = Recipe.model_fields.get(ALIASES.get(name, name))
    return Any if field is None or name in SWITCHES else field.annotation


def _may_be_a_switch(name: str) -> bool:
    """True for a key that is on when no value stands behind it: ``--packing``, ``--flash-attn``."""
    kinds = kinds_of(_type_of(name))
    return Any in kinds or bool in kinds or "true" in VALUE_ALIASES.get(ALIASES.get(name, name), {})


def _is_value_of(name: str, word: str) -> bool:
    """True if ``word`` is the value of ``--name`` before it: a switch needs none, so a recipe after it is a recipe."""
    if word.startswith("--"):
        return False
    kinds = (bool, str) if name in SWITCHES else kinds_of(_type_of(name))
    if set(kinds) == {bool}:
        return word.lower() in _YES_AND_NO
    return bool not in kinds or not word.lower().endswith((".yaml", ".yml"))


def matrix_recipe(words: list[str], settings: list[str], *, model: str) -> Recipe:
    """The pins of all cells; what varies from cell to cell may not be pinned."""
    path, options = split_words(words)
    for name, instead in (("model", "--models"), ("seq_len", "--context")):
        if name in canonical_keys(options, where="the options"):
            raise RecipeError(
                f"{name} differs from cell to cell of a matrix, so it cannot be set for all",
                hint=f"{instead} alone",
            )
    return read_any_recipe(path, settings=settings, options={**options, "model": model}).recipe
