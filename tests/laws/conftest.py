"""Grids that take minutes: some of their cases stand for the others, which `pytest -m slow` runs."""

from collections import Counter

import pytest

from laws.test_memory_prediction import bench


@pytest.fixture(scope="session")
def model():
    """What a real step can be made of in a second."""
    return bench.small_model()


@pytest.hookimpl(tryfirst=True)  # before `-m` decides what is left out
def pytest_collection_modifyitems(items):
    """``@pytest.mark.thinned(n)``: every n-th case of a grid runs always, the others are marked slow."""
    seen = Counter()
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is None or item.get_closest_marker("slow"):
            continue
        grid = item.nodeid.partition("[")[0]
        if seen[grid] % thinned.args[0]:
            item.add_marker(pytest.mark.slow)
        seen[grid] += 1
