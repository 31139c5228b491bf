"""The learning rate is a pure function of the step."""

import math

import pytest

from fitune.values.plan import Epochs, Fraction, Schedule, Steps
from fitune.values.schedule import is_due, learning_rate, total_steps, warmup_steps


def schedule(kind="cosine", **changes):
    settings = {
        "learning_rate": 1e-3, "kind": kind, "warmup": Steps(count=4), "duration": Steps(count=20),
        "max_grad_norm": 1.0,
    }  # fmt: skip
    return Schedule(**{**settings, **changes})


def test_warmup_rises_linearly_and_never_starts_at_zero():
    rates = [learning_rate(schedule(), step=step, total=20) for step in range(4)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])


@pytest.mark.parametrize(
    ("kind", "quarter", "end"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.1 + 0.9 * 0.75, 0.1),
        ("cosine", 0.1 + 0.9 * (0.5 + 0.25 * math.sqrt(2)), 0.1),
    ],
)
def test_decay_ends_at_the_least_rate(kind, quarter, end):
    ends = schedule(kind, min_ratio=0.1)
    for step, share in ((4, 1.0), (8, quarter), (20, end)):
        assert learning_rate(ends, step=step, total=20) == pytest.approx(1e-3 * share)


def test_a_cosine_to_a_least_rate_is_that_of_transformers():
    """Without warm-up: theirs begins it at 0 and this one at the first step's share."""
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = get_scheduler(
        "cosine_with_min_lr", optimizer, num_warmup_steps=0, num_training_steps=20,
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )  # fmt: skip
    ours = schedule(min_ratio=0.1, warmup=Steps(count=0))
    for step in range(20):
        assert learning_rate(ours, step=step, total=20) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_durations():
    assert total_steps(schedule(duration=Epochs(count=2.5)), steps_per_epoch=10) == 25
    assert total_steps(schedule(duration=Epochs(count=0.01)), steps_per_epoch=10) == 1
    assert total_steps(schedule(duration=Epochs(count=3.0)), steps_per_epoch=7) == 21
    assert warmup_steps(schedule(warmup=Fraction(of=0.03)), total=100) == 3
    assert warmup_steps(schedule(warmup=Steps(count=50)), total=10) == 10


def test_due_every_so_many_steps_or_so_often_an_epoch():
    def steps(**often):
        often = {"every": 0, "per_epoch": 0, "steps_per_epoch": 5, **often}
        return [step for step in range(1, 11) if is_due(step, **often)]

    assert steps() == []
    assert steps(every=3) == [3, 6, 9]
    assert steps(per_epoch=1) == [5, 10]
    assert steps(per_epoch=2) == [3, 5, 8, 10]
    assert steps(per_epoch=9) == list(range(1, 11))
