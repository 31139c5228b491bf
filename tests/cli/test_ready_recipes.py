"""The recipes that come with fitune are valid, and those that name public models and GPUs can be planned."""

from pathlib import Path

import pytest

from fitune.cli.planning import plan_for
from fitune.spec.recipe import read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_ready_recipe_is_valid_and_fits_what_it_is_named_after(path: Path) -> None:
    recipe = read_recipe(path)
    if recipe.gpu is not None:
        assert plan_for(recipe).chosen.estimate.fits


def test_there_are_recipes() -> None:
    assert RECIPES
