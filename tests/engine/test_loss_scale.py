"""fp16's loss scale: down when gradients overflow, up when they do not, and an end when it cannot go down."""

import pytest

from fitune.engine.gradient_scale import LossScale
from fitune.errors import TrainingFailed


def test_it_halves_and_doubles():
    scale = LossScale(value=8.0, growth_interval=2)
    scale.update(overflowed=True)
    assert scale.value == 4.0
    scale.update(overflowed=False)
    scale.update(overflowed=False)
    assert scale.value == 8.0


def test_overflows_at_the_smallest_scale_end_the_run():
    """Every such step is skipped: without an end the run would go through all its data and learn nothing."""
    scale = LossScale(value=4.0, patience=3)
    for _ in range(2 + 2):
        scale.update(overflowed=True)
    with pytest.raises(TrainingFailed, match=r"3 steps in a row at the smallest loss scale \(1\)") as caught:
        scale.update(overflowed=True)
    assert "bf16-master" in str(caught.value.hint)


def test_the_overflows_before_a_resume_count():
    before, after = LossScale(value=1.0, patience=3), LossScale(patience=3)
    before.update(overflowed=True)
    before.update(overflowed=True)
    after.restore(before.facts())
    with pytest.raises(TrainingFailed, match="3 steps in a row"):
        after.update(overflowed=True)


def test_one_good_step_gives_hope_again():
    scale = LossScale(value=1.0, patience=3)
    for _ in range(5):
        scale.update(overflowed=True)
        scale.update(overflowed=True)
        scale.update(overflowed=False)
    assert scale.value == 1.0
