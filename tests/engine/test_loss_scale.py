"""fp16's loss scale: down when gradients overflow, up when they do not, and an end when it cannot go down."""

import math

import pytest

from fitune.engine.gradient_scale import LossScale
from fitune.errors import TrainingFailed
from fitune.values.plan import Precision


def scale_of(value, **facts):
    scale = LossScale(Precision.FP16)
    scale.restore({"loss_scale": value, "clean_steps": 0, "futile_steps": 0, **facts})
    return scale


def overflow(scale):
    scale.after_step(math.inf, skipped=True)


def test_it_halves_and_doubles():
    scale = scale_of(8.0, clean_steps=998)
    scale.after_step(1.0, skipped=False)
    scale.after_step(1.0, skipped=False)
    assert scale.value == 16.0
    overflow(scale)
    assert scale.value == 8.0


def test_overflows_at_the_smallest_scale_end_the_run():
    """Every such step is skipped: without an end the run would go through all its data and learn nothing."""
    scale = scale_of(4.0)
    for _ in range(2 + 10):
        overflow(scale)
    after = scale_of(1.0, **scale.facts())  # those before a resume count
    for _ in range(9):
        overflow(after)
    with pytest.raises(TrainingFailed, match=r"20 steps in a row at the smallest loss scale \(1\)") as caught:
        overflow(after)
    assert "bf16-master" in str(caught.value.hint)


def test_one_good_step_gives_hope_again():
    scale = scale_of(1.0)
    for _ in range(5):
        for _ in range(19):
            overflow(scale)
        scale.after_step(1.0, skipped=False)
    assert scale.value == 1.0
