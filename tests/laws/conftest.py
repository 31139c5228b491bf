"""What the laws of memory measure: a small model."""

import pytest

from laws.test_memory_prediction import bench


@pytest.fixture(scope="session")
def model():
    """What a real step can be made of in a second."""
    return bench.small_model()
