"""Means with their confidence intervals, and two scorings of the same rows: the difference of their means, if it may be
chance, and the rows that changed.

Intervals are percentile bootstraps (Efron 1979) of 95 %. Rows with equal values are alike, so a resample is one draw
of a multinomial over the distinct values: the same distribution as drawing rows. Beyond some thousand distinct values
the mean is normal enough, and its error comes from running sums. The rows of two scorings are brought together by their
ids in a temporary database. Memory does not grow with the rows.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, read_text
from fitune.score.index import open_index
from fitune.spec.reports import PairedScore, Scale, ScoreReport
from fitune.spec.serial import from_json

_MOST_VALUES = 5_000
"""Distinct values up to which resamples are drawn; beyond them the mean is normal enough."""
_NORMAL_95 = 1.959964
"""Standard errors on each side of a normal mean that hold 95 %."""
_RESAMPLES = 2_000
_DRAWN_TOGETHER = 100
"""Resamples that exist at a time: all of them, of 5,000 values, would take 80 MB."""
_SEED = 95
_BLOCK = 1_024
_MOST_EXACT = 10_000
"""Discordant rows up to which McNemar's test is exact."""


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
            if len(self._counts) > _MOST_VALUES:
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
            error = _NORMAL_95 * self._moments.root((0.0, -apart / weights, 1.0)) / weights
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


Pair = tuple[float, float, float, float]
"""Grade and weight of a row here, grade and weight there."""
Changed = dict[str, Any]
"""Id, grades here and grades there of a row that some grader gave another grade."""


def compare(
    directory: Path, other: Path, *, on_changed: Callable[[Changed], object] = lambda row: None
) -> list[PairedScore]:
    """Both scorings by every grader that both have, on the rows that both have. ``on_changed`` is given the rows whose
    grade changed, in the order of ``directory``.

    Raises RunDirectoryError when a folder has no grades or nothing is common to both.
    """
    scales = _scales(directory)
    found: dict[str, _Paired] = {}
    with open_index() as theirs:
        theirs.add_texts((row["id"], line) for line, row in grades_of(other))
        for _, row in grades_of(directory):
            line = theirs.text(row["id"])
            if line is None:
                continue
            before = json.loads(line)
            weights, others = row.get("weights", {}), before.get("weights", {})
            common: dict[str, Pair] = {
                name: (mine, weights.get(name, 1.0), their, others.get(name, 1.0))
                for name, mine in row["grades"].items()
                if mine is not None and (their := before["grades"].get(name)) is not None
            }
            for name, pair in common.items():
                if name not in found:
                    found[name] = _Paired(scales.get(name, "share"))
                found[name].add(pair)
            if any(mine != their for mine, _, their, _ in common.values()):
                on_changed({"id": row["id"], "grades": row["grades"], "other": before["grades"]})
    if not found:
        raise RunDirectoryError(
            f"{directory} and {other} have no row and grader in common",
            hint="score the same data by the same grader",
        )
    return [found[name].score(name) for name in sorted(found)]


class _Paired:
    """Running sums of one grader's pairs."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._rows = self._better = self._worse = 0
        self._is_binary = True
        self._here, self._there, self._difference = WeightedMean(scale), WeightedMean(scale), WeightedMean()
        self._logs = _LogPairs() if scale == "perplexity" else None

    def add(self, pair: Pair) -> None:
        """A row that both scorings graded: this one's grade and weight, then the other's."""
        mine, weight, their, other = pair
        self._rows += 1
        apart = their - mine if self._logs else mine - their
        self._better += apart > 0
        self._worse += apart < 0
        self._is_binary = self._is_binary and mine in (0.0, 1.0) and their in (0.0, 1.0)
        self._here.add(mine, weight)
        self._there.add(their, other)
        if self._logs:
            self._logs.add(math.log(mine), weight, math.log(their), other)
        else:
            self._difference.add(mine - their)

    def score(self, name: str) -> PairedScore:
        """The comparison so far. McNemar's p-value only where all grades are 0 or 1."""
        here, there = self._here.mean, self._there.mean
        if self._logs:
            difference = here - there
            low, high = self._logs.ends(here, there)
        else:
            difference, low, high = self._difference.interval()
        return PairedScore(
            grader=name, rows=self._rows, mean=here, other=there, difference=difference, low=low, high=high,
            better=self._better, worse=self._worse,
            p_value=mcnemar(self._better, self._worse) if self._is_binary else None, scale=self._scale,
        )  # fmt: skip


class _LogPairs:
    """The interval of a difference of two perplexities. Rows are drawn together; past _MOST_VALUES their influences on
    the difference are summed."""

    def __init__(self) -> None:
        self._few: list[Pair] | None = []
        self._moments = Moments(4)
        self._first = (0.0, 0.0)

    def add(self, log: float, weight: float, other_log: float, other: float) -> None:
        """A row: mean nats and tokens here, then there."""
        if self._few is not None:
            self._first = self._first if self._few else (log, other_log)
            self._few.append((log * weight, weight, other_log * other, other))
            if len(self._few) > _MOST_VALUES:
                self._few = None
        first, other_first = self._first
        self._moments.add((weight * (log - first), weight, other * (other_log - other_first), other))

    def ends(self, here: float, there: float) -> tuple[float, float]:
        """The 95 % interval of ``here`` − ``there``, two perplexities."""
        if self._few is None:
            apart, weights, other_apart, others = self._moments.total
            # d exp(Σ w·x / Σ w): perplexity · w · (x − mean) / Σ w for each row, here minus there
            mine, their = here / weights, there / others
            factors = (mine, -mine * apart / weights, -their, their * other_apart / others)
            spread = _NORMAL_95 * self._moments.root(factors)
            return here - there - spread, here - there + spread
        logs, weight, other_logs, other = np.array(self._few).T
        return resampled_ends(
            np.ones(len(logs)),
            lambda drawn: (
                np.exp(drawn @ logs / (drawn @ weight)) - np.exp(drawn @ other_logs / (drawn @ other))
            ),
        )


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value that as few as min(better, worse) of the changed rows went one way by chance.

    2 · Σ C(n, i) / 2ⁿ for i up to the smaller, n = better + worse; beyond _MOST_EXACT rows by the normal distribution
    with a continuity correction of 1/2.
    """
    changed, fewer = better + worse, min(better, worse)
    if not changed:
        return 1.0
    if changed > _MOST_EXACT:
        return min(1.0, 2 * NormalDist(changed / 2, math.sqrt(changed) / 2).cdf(fewer + 0.5))
    ways = each = 1
    for few in range(fewer):
        each = each * (changed - few) // (few + 1)
        ways += each
    return min(1.0, 2 * ways / 2**changed)  # of whole numbers, of any size


def _scales(directory: Path) -> dict[str, Scale]:
    """The scale of each grader, by the report; empty where there is none."""
    path = directory / "report.json"
    try:
        return from_json(ScoreReport, read_text(path, follow_links=False)).scales
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error}", hint="score again") from None


def grades_of(directory: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each row as it is written, and read."""
    try:
        with open_regular(directory / "grades.jsonl", follow_links=False) as file:
            for line in file:
                yield line, json.loads(line)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory}: has no grades that can be read: {error}", hint="name the --out of a finished score"
        ) from None
