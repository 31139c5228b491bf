"""Confidence intervals of means.

Intervals are percentile bootstraps (Efron 1979) of 95 %. Rows with equal values are alike, so a resample is one draw
of a multinomial over the distinct values: the same distribution as drawing rows. Beyond some thousand distinct values
the mean is normal enough, and its error comes from running sums. Memory does not grow with the rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fitune.spec.reports import Scale

MOST_VALUES = 5_000
"""Distinct values up to which resamples are drawn; beyond them the mean is normal enough."""
NORMAL_95 = 1.959964
"""Standard errors on each side of a normal mean that hold 95 %."""
_RESAMPLES = 2_000
_DRAWN_TOGETHER = 100
"""Resamples that exist at a time: all of them, of 5,000 values, would take 80 MB."""
_SEED = 95
_BLOCK = 1_024


class WeightedMean:
    """Σ weight · value / Σ weight over rows that are added one after another, and its 95 % interval by drawing rows.

    Perplexities are averaged as logarithms: exp(Σ nats / Σ tokens).
    """

    def __init__(self, scale: Scale = "share") -> None:
        self._is_perplexity = scale == "perplexity"
        self._counts: Counter[tuple[float, float]] | None = Counter()
        self._first: float | None = None
        self._moments = Moments(3)

    def add(self, grade: float, weight: float = 1.0) -> None:
        """A row more. A perplexity is given as such, and averaged as its logarithm."""
        value = math.log(grade) if self._is_perplexity else grade
        if self._first is None:
            self._first = value
        apart = weight * (value - self._first)  # squares of values far from 0 would cancel
        self._moments.add((weight * value, weight, apart))
        if self._counts is not None:
            self._counts[value, weight] += 1
            if len(self._counts) > MOST_VALUES:
                self._counts = None

    @property
    def mean(self) -> float:
        """0 without rows; of perplexities 1."""
        total, weight, _ = self._moments.total
        mean = float(total / weight) if weight else 0.0
        return math.exp(mean) if self._is_perplexity else mean

    def interval(self) -> tuple[float, float, float]:
        """Mean and the ends of its interval."""
        low, high = self._ends()
        if self._is_perplexity:
            low, high = math.exp(low), math.exp(high)
        return self.mean, low, high

    def _ends(self) -> tuple[float, float]:
        total, weights, apart = self._moments.total
        if not weights:
            return 0.0, 0.0
        if self._counts is None:
            mean = float(total / weights)
            error = NORMAL_95 * self._moments.root((0.0, -apart / weights, 1.0)) / weights
            return float(mean - error), float(mean + error)
        seen = np.array(sorted(self._counts), dtype=float)
        times = np.array([self._counts[value, weight] for value, weight in seen])
        value, weight = seen[:, 0], seen[:, 1]
        return resampled_ends(times, lambda drawn: drawn @ (value * weight) / (drawn @ weight))


class Moments:
    """Σ p and Σ p·pᵀ of vectors p that are added one after another."""

    def __init__(self, size: int) -> None:
        self._total, self._products = np.zeros(size), np.zeros((size, size))
        self._block: list[Sequence[float]] = []

    def add(self, vector: Sequence[float]) -> None:
        """A vector more; products are taken of many at once."""
        self._block.append(vector)
        if len(self._block) == _BLOCK:
            self._add_block()

    @property
    def total(self) -> Any:
        """Σ p, of shape (size,)."""
        self._add_block()
        return self._total

    def root(self, factors: Sequence[float]) -> float:
        """√ Σ (factors · p)²."""
        self._add_block()
        wanted = np.array(factors)
        return math.sqrt(max(float(wanted @ self._products @ wanted), 0.0))

    def _add_block(self) -> None:
        if self._block:
            rows = np.array(self._block)
            self._total += rows.sum(axis=0)
            self._products += rows.T @ rows
            self._block = []


def resampled_ends(times: Any, statistic: Callable[[Any], Any]) -> tuple[float, float]:
    """The ends of the 95 % interval of ``statistic``, which takes how often each row is drawn [draws, rows]."""
    random = np.random.default_rng(_SEED)
    total = times.sum()
    found = [
        statistic(random.multinomial(total, times / total, size=_DRAWN_TOGETHER))
        for _ in range(_RESAMPLES // _DRAWN_TOGETHER)
    ]
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return float(low), float(high)
