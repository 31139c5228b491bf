"""The learning rate as a function of the step, and of nothing else."""

import math

from fitune.values.plan import Epochs, Fraction, Schedule, Steps


def total_steps(schedule: Schedule, *, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run; at least one."""
    match schedule.duration:
        case Steps(count=count):
            return count
        case Epochs(count=count):
            return max(1, math.ceil(count * steps_per_epoch - 1e-9))


def warmup_steps(schedule: Schedule, *, total: int) -> int:
    """Steps of the warm-up, at most ``total``."""
    match schedule.warmup:
        case Steps(count=count):
            return min(count, total)
        case Fraction(of=share):
            return math.ceil(share * total)


def is_due(step: int, *, every: int, per_epoch: int, steps_per_epoch: int) -> bool:
    """True behind update ``step`` (1-based) when ``every`` more steps are done, or one more of the ``per_epoch`` equal
    parts of an epoch. 0 is never."""
    parts = [n * per_epoch // steps_per_epoch for n in (step - 1, step)]
    return (every > 0 and step % every == 0) or parts[0] < parts[1]


def learning_rate(schedule: Schedule, *, step: int, total: int) -> float:
    """The rate for update ``step`` (0-based): linear warm-up that never starts at 0, then the decay.

    Cosine: ½·(1 + cos(π·x)) (Loshchilov & Hutter, arXiv 1608.03983, one half period); linear: 1 − x;
    x is the share of the steps after warm-up that are done. Both fall from 1 to ``min_ratio``: min + (1 − min) · decay.
    The last update still moves the weights.
    """
    warmup = warmup_steps(schedule, total=total)
    if step < warmup:
        return schedule.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    match schedule.kind:
        case "constant":
            return schedule.learning_rate
        case "linear":
            decay = 1.0 - done
        case "cosine":
            decay = 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.learning_rate * (schedule.min_ratio + (1.0 - schedule.min_ratio) * decay)
