"""The recipes that come with fitune are valid, and those that name public models and GPUs can be planned."""

import re
from pathlib import Path

import pytest

from fitune.session.planning import plan_for
from fitune.session.recipes.reading import read_any_recipe
from fitune.units import GIB

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_ready_recipe_is_valid_and_fits_what_it_is_named_after(path, monkeypatch):
    monkeypatch.chdir(path.parent)  # models of the demo are not there before it has run
    recipe = read_any_recipe(path)
    if recipe.gpu is not None:
        estimate = plan_for(recipe).chosen.estimate
        assert estimate.fits
        said = re.search(r"predicts ([\d.]+) GiB .*of ([\d.]+) usable.* ([\d,]+) tokens/s", header(path))
        assert said, "the header says what is predicted"
        peak, usable, speed = (float(number.replace(",", "")) for number in said.groups())
        assert peak == pytest.approx(estimate.peak_bytes / GIB, abs=0.05)
        assert usable == pytest.approx(estimate.usable_bytes / GIB, abs=0.01)
        assert speed == pytest.approx(estimate.tokens_per_second, rel=0.005)
        if on_host := re.search(r"([\d,.]+) GiB on the host", header(path)):
            said_bytes = float(on_host.group(1).replace(",", "")) * GIB
            assert said_bytes == pytest.approx(estimate.host_bytes, rel=0.005)


def header(path):
    """The comment that opens a recipe, as one line."""
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
    return " ".join(lines)
