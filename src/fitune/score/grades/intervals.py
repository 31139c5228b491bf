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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from fitune.errors import RunDirectoryError
from fitune.score.answers import written_rows
from fitune.score.index import open_index
from fitune.values.reports import PairedScore, Scale

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


class Ratios:
    """Σ w·x / Σ w of one or more columns over rows that are added one after another, and the 95 % interval of a
    function of these means by drawing rows. Past _MOST_VALUES distinct rows their influences are summed."""

    def __init__(self, columns: int = 1) -> None:
        self._counts: Counter[tuple[float, ...]] | None = Counter()
        self._first: tuple[float, ...] = ()
        self._total, self._products = np.zeros(3 * columns), np.zeros((3 * columns, 3 * columns))
        self._block: list[list[float]] = []

    def add(self, *row: float) -> None:
        """A row more: value and weight of each column."""
        self._first = self._first or row[::2]
        columns = zip(row[::2], row[1::2], self._first, strict=True)
        # squares of values far from 0 would cancel; products are taken of many at once
        self._block.append([part for x, w, first in columns for part in (w * x, w, w * (x - first))])
        if len(self._block) == _BLOCK:
            self._add_block()
        if self._counts is not None:
            self._counts[row] += 1
            if len(self._counts) > _MOST_VALUES:
                self._counts = None

    @property
    def means(self) -> Any:
        """The mean of each column; 0 without rows."""
        self._add_block()
        sums, weights, _ = self._total.reshape(-1, 3).T
        return np.divide(sums, weights, out=np.zeros(len(sums)), where=weights != 0)

    def ends(
        self, of: Callable[[Any], Any] = lambda means: means[0], slopes: Callable[[Any], Any] = np.ones_like
    ) -> tuple[float, float]:
        """The ends of the interval of ``of``, whose derivatives by each mean are ``slopes``."""
        means = self.means
        _, weights, apart = self._total.reshape(-1, 3).T
        if not weights.all():
            return 0.0, 0.0
        if self._counts is None:
            # d mean = w · (x − mean) / Σ w for each row
            each = zip(slopes(means) / weights, apart / weights, strict=True)
            factors = np.array([part for slope, mean in each for part in (0.0, -slope * mean, slope)])
            error = _NORMAL_95 * math.sqrt(max(float(factors @ self._products @ factors), 0.0))
            return float(of(means) - error), float(of(means) + error)
        rows = sorted(self._counts)
        times, columns = np.array([self._counts[row] for row in rows]), np.array(rows, dtype=float).T
        pairs = list(zip(columns[::2], columns[1::2], strict=True))
        return resampled_ends(times, lambda drawn: of([drawn @ (x * w) / (drawn @ w) for x, w in pairs]))

    def _add_block(self) -> None:
        if self._block:
            rows = np.array(self._block)
            self._total += rows.sum(axis=0)
            self._products += rows.T @ rows
            self._block = []


class WeightedMean:
    """A weighted mean of grades with its interval. Perplexities are averaged as logarithms: exp(Σ nats / Σ tokens)."""

    def __init__(self, scale: Scale = "share") -> None:
        self._is_perplexity, self._rows = scale == "perplexity", Ratios()

    def add(self, grade: float, weight: float = 1.0) -> None:
        """A row more. A perplexity is given as such, and averaged as its logarithm."""
        self._rows.add(math.log(grade) if self._is_perplexity else grade, weight)

    @property
    def mean(self) -> float:
        """0 without rows; of perplexities 1."""
        mean = float(self._rows.means[0])
        return math.exp(mean) if self._is_perplexity else mean

    def interval(self) -> tuple[float, float, float]:
        """Mean and the ends of its interval."""
        low, high = self._rows.ends()
        if self._is_perplexity:
            low, high = math.exp(low), math.exp(high)
        return self.mean, low, high


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


def paired_scores(
    directory: Path,
    other: Path,
    *,
    scales: Mapping[str, Scale] = {},
    on_changed: Callable[[Changed], object] = lambda row: None,
) -> list[PairedScore]:
    """Both scorings by every grader that both have, on the rows that both have. ``scales`` of the graders are those of
    the report, a share where it has none; ``on_changed`` is given the rows whose grade changed, in the order of
    ``directory``.

    Raises RunDirectoryError when a folder has no grades or nothing is common to both.
    """
    found: dict[str, _Paired] = {}
    ours, theirs = set[str](), set[str]()
    with open_index() as others:
        others.add_texts((row["id"], line) for line, row in grades_of(other))
        for _, row in grades_of(directory):
            line = others.text(row["id"])
            if line is None:
                continue
            before = json.loads(line)
            ours |= row["grades"].keys()
            theirs |= before["grades"].keys()
            weights, their_weights = row.get("weights", {}), before.get("weights", {})
            common: dict[str, Pair] = {
                name: (mine, weights.get(name, 1.0), their, their_weights.get(name, 1.0))
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
        graded = (
            f"{', '.join(sorted(ours))} here, {', '.join(sorted(theirs))} there"
            if ours
            else "no id is in both"
        )
        raise RunDirectoryError(
            f"{directory} and {other} have no row and grader in common: {graded}",
            hint="score the same data by the same --grader: answers that are there are kept",
        )
    return [found[name].score(name) for name in sorted(found)]


class _Paired:
    """Running sums of one grader's pairs."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._rows = self._better = self._worse = 0
        self._is_binary = True
        self._here, self._there, self._difference = WeightedMean(scale), WeightedMean(scale), WeightedMean()
        self._logs = Ratios(2) if scale == "perplexity" else None

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
            low, high = self._logs.ends(_difference, lambda logs: np.exp(logs) * (1, -1))
        else:
            difference, low, high = self._difference.interval()
        return PairedScore(
            grader=name, rows=self._rows, mean=here, other=there, difference=difference, low=low, high=high,
            better=self._better, worse=self._worse,
            p_value=mcnemar(self._better, self._worse) if self._is_binary else None, scale=self._scale,
        )  # fmt: skip


def _difference(logs: Any) -> Any:
    """Returns the first perplexity less the second; ``logs`` are the logarithms of the two."""
    return np.exp(logs[0]) - np.exp(logs[1])


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


def grades_of(directory: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each row of grades as it is written, and read. Raises RunDirectoryError."""
    return written_rows(directory / "grades.jsonl", "id", "grades", check=_require_numbers)


def _require_numbers(row: dict[str, Any]) -> None:
    """Raises ValueError where a grade is neither a number nor None, or a weight is no number."""
    for part, kinds in (("grades", int | float | None), ("weights", int | float)):
        for name, value in row.get(part, {}).items():
            if not isinstance(value, kinds):
                raise ValueError(f"{part} of {row['id']!r:.60}: {name} is {value!r:.40}, no number")
