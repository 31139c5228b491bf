"""Writes session/recipes/keywords.pyi, the keys of a recipe as typed keywords of Python, from ``Recipe`` and
``ScoreRecipe``.

    python bench/keywords.py

Editors and type checkers read it; nothing imports it when fitune runs. tests/session/test_python_api.py holds the file
against what this makes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from fitune.recipe.recipe import Recipe, SourceRecipe
from fitune.recipe.score_recipe import ScoreRecipe, as_name
from fitune.recipe.types import as_bandwidth, as_path, as_size, as_template

FILE = Path(__file__).parents[1] / "src" / "fitune" / "session" / "recipes" / "keywords.pyi"
_LOOSE = {
    as_path: "PathLike", as_template: "PathLike", as_name: "PathLike", as_size: "int | str",
    as_bandwidth: "float | str",
}  # fmt: skip
"""What turns a value into a setting -> the types that it takes."""
_HEAD = '''"""The keys of a recipe as keyword arguments, for editors and type checkers. Written by bench/keywords.py."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from fitune.recipe.recipe import Recipe

PathLike: TypeAlias = str | os.PathLike[str]
RecipeLike: TypeAlias = PathLike | Recipe | Mapping[str, Any]
"""A YAML file, a recipe that was read already, or a mapping of keys."""

class RecipeKeys(TypedDict, total=False):
    """Every key of a recipe. None leaves a setting to the planner, as a key that is not given does."""

'''


def typed(annotation: Any) -> str:
    """The type as people may write it: a path for a text that is one, a text for a list."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is SourceRecipe:
        return "PathLike | Mapping[str, Any]"
    if origin is Literal:
        # typing hands out equal ones in any order
        words = sorted(f'"{part}"' if isinstance(part, str) else str(part) for part in parts)
        return f"Literal[{', '.join(words)}]"
    if origin is Annotated:
        loose = [_LOOSE[made] for part in parts[1:] if (made := getattr(part, "func", None)) in _LOOSE]
        return loose[0] if loose else typed(parts[0])
    if annotation is Path:
        return "PathLike"
    if origin in (list, tuple):
        one = typed(parts[0])
        return f"{'' if one.startswith(('str', 'PathLike')) else 'str | '}{one} | Sequence[{one}]"
    if origin is dict:
        return f"PathLike | Mapping[{typed(parts[0])}, Any]"
    if parts:
        return " | ".join(typed(part) for part in parts)
    return "None" if annotation is NoneType else str(annotation.__name__)


_SCORE = '''
class ScoreKeys(TypedDict, total=False):
    """Keys of a scoring beside those that have a place of their own. None leaves a setting as it is by itself."""

'''
_PLACED = ("model", "data", "out", "lm_eval", "lm_eval_tasks")


def stub() -> str:
    """The text of keywords.pyi."""
    return _HEAD + "".join(_keys(Recipe)) + _SCORE + "".join(_keys(ScoreRecipe, without=_PLACED))


def _keys(recipe: type[BaseModel], *, without: Sequence[str] = ()) -> Iterator[str]:
    for name, field in recipe.model_fields.items():
        if name not in without:
            kept = [part for part in field.metadata if getattr(part, "func", None) in _LOOSE]
            yield f"    {name}: {typed(Annotated[field.annotation, *kept] if kept else field.annotation)}\n"


if __name__ == "__main__":
    FILE.write_text(stub())
