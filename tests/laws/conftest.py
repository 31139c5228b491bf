"""Grids that take minutes: some of their cases stand for the others, which `make slow` and `make weekly` run."""

from collections import Counter
from pathlib import Path

import pytest

from laws.test_memory_prediction import bench


@pytest.fixture(scope="session")
def model():
    """What a real step can be made of in a second."""
    return bench.small_model()


@pytest.hookimpl(tryfirst=True)  # before `-m` decides what is left out
def pytest_collection_modifyitems(items):
    """``@pytest.mark.thinned(n)``: every n-th case of a grid runs always, the others are marked slow. Of the slow cases
    of a law's grid every third is, the others are weekly."""
    seen, slow = Counter(), Counter()
    for item in items:
        grid = item.nodeid.partition("[")[0]
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and not item.get_closest_marker("slow"):
            if seen[grid] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[grid] += 1
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow"):
            if slow[grid] % 3:
                item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
                item.add_marker(pytest.mark.weekly)
            slow[grid] += 1
