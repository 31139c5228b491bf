"""Steps whose loss jumps: they are told with their rows, and nothing is rewound or left out."""

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


def jump_words(step: int, loss: float, rows: Sequence[int]) -> str:
    return f"step {step}: the loss jumped to {loss:.3f}; training goes on. {row_words(rows)}"


_ROWS_NAMED = 20


def row_words(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return f"Rows of this step, counted from 0 in the kept rows: {list(rows[:_ROWS_NAMED])}{more}"
