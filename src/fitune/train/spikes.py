"""Steps whose loss jumps, told with their rows, and steps of nothing but zeros; nothing is rewound or left out."""

import statistics
from collections import deque
from collections.abc import Sequence

_STEPS = 20
"""Steps before, which a loss is held against."""

_LEAST_STEPS = 8
_SPREADS, _LEAST_NATS = 6.0, 0.5
"""A jump is above the median by six times the mean distance from it, and by half a nat: small losses are noisy."""


class LossWatch:
    """Remembers the losses of the last steps."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_STEPS)

    def usual(self) -> float:
        """Median of the last losses."""
        return statistics.median(self._losses)

    def jumps(self, loss: float) -> bool:
        """True if ``loss`` lies far above the last ones; it is one of them from now on."""
        has_jumped = False
        if len(self._losses) >= _LEAST_STEPS:
            usual = self.usual()
            spread = statistics.fmean(abs(one - usual) for one in self._losses)
            has_jumped = loss - usual > max(_SPREADS * spread, _LEAST_NATS)
        self._losses.append(loss)
        return has_jumped


_ZEROS = 3


class ZeroWatch:
    """Counts the steps in a row whose loss, or whose gradients' norm, is exactly 0."""

    def __init__(self) -> None:
        self._counts = {"loss": 0, "gradient norm": 0}

    def words(self, *, step: int, loss: float, grad_norm: float) -> str:
        """A warning with the third one in a row, else empty."""
        warning = ""
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            self._counts[name] = self._counts[name] + 1 if value == 0 else 0
            if self._counts[name] == _ZEROS:
                warning = (
                    f"step {step}: the {name} was exactly 0 in the last {_ZEROS} steps: {_ZERO_MEANS[name]}"
                )
        return warning


_ZERO_MEANS = {
    "loss": "no token is learned, or the kernels of this device do not work; look at the labels "
    "(train_on_prompt), and compare with a few steps on the CPU (--gpu cpu)",
    "gradient norm": "no weight changes; look at what is trained (lora_target_modules), and compare with a few steps "
    "on the CPU (--gpu cpu)",
}


def jump_words(step: int, loss: float, rows: Sequence[int]) -> str:
    return f"step {step}: the loss jumped to {loss:.3f}; training goes on. {row_words(rows)}"


_ROWS_NAMED = 20


def row_words(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return f"Rows of this step, counted from 0 in the kept rows: {list(rows[:_ROWS_NAMED])}{more}"
