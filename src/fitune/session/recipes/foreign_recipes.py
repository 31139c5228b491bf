"""Any recipe becomes a Recipe: fitune's own, or another trainer's, with lines that say what became of its keys."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fitune.errors import RecipeError
from fitune.spec.recipe.paths import require_model, with_own_paths
from fitune.spec.recipe.recipe import Recipe, canonical_keys, given_options, layered_recipe
from fitune.spec.recipe.strict_yaml import load_yaml
from fitune.units import wrapped

if TYPE_CHECKING:  # a recipe of options alone is no other trainer's
    from fitune.foreign.reading import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRecipe:
    """A recipe, and lines for people about how another trainer's keys were read."""

    recipe: Recipe
    notes: tuple[str, ...] = ()


def read_any_recipe(
    path: Path | None, *, settings: Iterable[str], options: Mapping[str, Any] | None
) -> ReadRecipe:
    """A YAML file of fitune or of another trainer, then ``a.b=c`` settings, then options; the later wins.

    Raises RecipeError that lists every key that is unknown or would change the result.
    """
    options = given_options(options)
    if path is None:
        return ReadRecipe(
            recipe=layered_recipe({}, where="the command line", settings=settings, options=options)
        )
    return recipe_of_keys(
        load_yaml(path), where=str(path), folder=path.parent, settings=settings, options=options
    )


def recipe_of_keys(
    raw: Mapping[str, Any], *, where: str, folder: Path, settings: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> ReadRecipe:  # fmt: skip
    """The recipe of the keys of a file in ``folder``, with settings and options on top."""
    from fitune.foreign.door import read_foreign

    reading = read_foreign(raw, where=where, folder=folder)
    if reading is None:
        own = with_own_paths(canonical_keys(raw, where=where), folder)
        recipe = layered_recipe(own, where=where, settings=settings, options=options)
        require_model(recipe.model, folder, where=where)
        return ReadRecipe(recipe=recipe)
    from fitune.foreign.reading import SHARDING, explain_reading, require_readable, without_data

    require_readable(reading)
    settings = tuple(settings)
    keys = with_own_paths(reading.settings, folder)
    recipe = layered_recipe(keys, where=where, settings=settings, options=options)
    notes = explain_reading(reading)
    divided = [name for name in SHARDING if name in reading.settings]
    if (recipe.gpus or 1) * recipe.nodes == 1 and divided:
        kept = {name: value for name, value in keys.items() if name not in divided}
        recipe = layered_recipe(kept, where=where, settings=settings, options=options)
        notes.append(f"  left to the plan on one device: {', '.join(divided)} (gpus: N divides the model)")
    if not recipe.data and (said := without_data(reading)):
        notes.append(wrapped(said, hanging=2))
    return ReadRecipe(recipe=recipe, notes=tuple(notes))


def convert_recipe(path: Path) -> str:
    """Another trainer's recipe as one of fitune's, with a comment on each line. Raises RecipeError for one of ours."""
    from fitune.foreign.door import read_foreign
    from fitune.foreign.reading import recipe_with_comments, require_readable

    reading = read_foreign(load_yaml(path), where=str(path), folder=path.parent)
    if reading is None:
        raise RecipeError(f"{path} is not recognised as another trainer's recipe", hint=f"fitune plan {path}")
    require_readable(reading)
    return recipe_with_comments(reading, _values(reading))


def _values(reading: "Reading") -> dict[str, Any]:
    """The settings that were read, checked and in the order of the Recipe."""
    recipe = layered_recipe(reading.settings, where=reading.where)
    values = recipe.model_dump(include=set(reading.settings), exclude_none=True)
    return {
        name: [_source(each) for each in value] if name in ("data", "eval_data") else value
        for name, value in values.items()
    }


def _source(source: dict[str, Any]) -> dict[str, Any]:
    """Without what a source has by default."""
    usual = {
        "format": "auto",
        "split": "train",
        "columns": {},
        "sample": 0,
        "weight": 1.0,
        "streaming": False,
    }
    return {key: value for key, value in source.items() if usual.get(key, ...) != value}
