"""How sure a mean is, and whether two scorings of the same rows differ by more than chance.

Intervals are percentile bootstraps (Efron 1979) of 95 %. Rows with equal values are alike, so a resample is one draw
of a multinomial over the distinct values: the same distribution as drawing rows. Beyond some thousand distinct values
the mean is normal enough, and its error comes from running sums.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, read_text
from fitune.spec.reports import PairedScore, Scale, ScoreReport
from fitune.spec.serial import from_json

RESAMPLES = 2_000
_SEED = 95
_MOST_VALUES = 5_000
"""Distinct values up to which resamples are drawn; beyond them the mean is normal enough."""
_MOST_EXACT = 10_000
"""Discordant rows up to which McNemar's test is exact."""


def mean_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % interval. No values: zeros."""
    return weighted_interval((value, 1.0) for value in values)


def weighted_interval(rows: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """Σ weight · value / Σ weight over rows of (value, weight), and the ends of its 95 % interval by drawing rows.

    No rows: zeros. Memory does not grow with the rows.
    """
    counts: Counter[tuple[float, float]] = Counter()
    sums = _Sums()
    for row in rows:
        sums.add(*row)
        if len(counts) <= _MOST_VALUES:
            counts[row] += 1
    if not sums.weight:
        return 0.0, 0.0, 0.0
    if len(counts) > _MOST_VALUES:
        mean, spread = sums.mean, 1.959964 * sums.error
        return mean, mean - spread, mean + spread
    seen = np.array(sorted(counts), dtype=float)
    times = np.array([counts[value, weight] for value, weight in seen])
    value, weight = seen[:, 0], seen[:, 1]
    drawn = _draws(times)
    low, high = np.quantile(drawn @ (value * weight) / (drawn @ weight), [0.025, 0.975])
    return float(value * weight @ times / (weight @ times)), float(low), float(high)


def _draws(times: Any) -> Any:
    """How often each distinct row is drawn in each resample."""
    total = times.sum()
    return np.random.default_rng(_SEED).multinomial(total, times / total, size=RESAMPLES)


class _Sums:
    """Running sums of a weighted mean and of its error; values are taken off the first one, so that nothing cancels."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._first: float | None = None
        self._total = self._squares = self._cross = self._weights = 0.0

    def add(self, value: float, weight: float) -> None:
        if self._first is None:
            self._first = value
        apart = value - self._first
        self.weight += weight
        self._total += weight * apart
        self._weights += weight * weight
        self._cross += weight * weight * apart
        self._squares += weight * weight * apart * apart

    @property
    def mean(self) -> float:
        return (self._first or 0.0) + self._total / self.weight

    @property
    def error(self) -> float:
        """√(Σ w² (x − mean)²) / Σ w: the standard error of a ratio of sums over rows."""
        apart = self._total / self.weight
        squares = self._squares - 2 * apart * self._cross + apart * apart * self._weights
        return math.sqrt(max(squares, 0.0)) / self.weight


def scaled_interval(rows: Iterable[tuple[float, float]], scale: Scale) -> tuple[float, float, float]:
    """``weighted_interval`` of grades; perplexities are averaged as logarithms: exp(Σ nats / Σ tokens)."""
    if scale != "perplexity":
        return weighted_interval(rows)
    mean, low, high = weighted_interval((math.log(grade), weight) for grade, weight in rows)
    return math.exp(mean), math.exp(low), math.exp(high)


Pair = tuple[float, float, float, float]
"""Grade and weight of a row here, grade and weight there."""


def compare(directory: Path, other: Path) -> tuple[list[PairedScore], list[dict[str, object]]]:
    """Both scorings by every grader that both have, on the rows that both have, and the rows whose grade changed.

    Raises RunDirectoryError when a folder has no grades or nothing is common to both.
    """
    theirs = {row["id"]: row for row in _grades(other)}
    pairs: dict[str, list[Pair]] = {}
    changed: list[dict[str, object]] = []
    for row in _grades(directory):
        before = theirs.get(row["id"])
        if before is None:
            continue
        common = {name: pair for name in row["grades"] if (pair := _pair(name, row, before)) is not None}
        for name, pair in common.items():
            pairs.setdefault(name, []).append(pair)
        if any(mine != their for mine, _, their, _ in common.values()):
            changed.append({"id": row["id"], "grades": row["grades"], "other": before["grades"]})
    if not pairs:
        raise RunDirectoryError(
            f"{directory} and {other} have no row and grader in common",
            hint="score the same data by the same grader",
        )
    scales = _scales(directory)
    return [_paired(name, found, scales.get(name, "share")) for name, found in sorted(pairs.items())], changed


def _pair(name: str, row: dict[str, Any], before: dict[str, Any]) -> Pair | None:
    """None where one of the two has no grade."""
    mine, their = row["grades"][name], before["grades"].get(name)
    if mine is None or their is None:
        return None
    return mine, row.get("weights", {}).get(name, 1.0), their, before.get("weights", {}).get(name, 1.0)


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
    return min(1.0, float(2 * ways / 2**changed)) if changed < 1000 else min(1.0, _ratio(2 * ways, changed))


def _ratio(ways: int, power: int) -> float:
    """ways / 2^power, where neither fits a float."""
    shift = max(0, ways.bit_length() - 64)
    return math.ldexp(float(ways >> shift), shift - power)


def _paired(name: str, pairs: list[Pair], scale: Scale) -> PairedScore:
    sign = -1 if scale == "perplexity" else 1
    if scale == "perplexity":
        difference, low, high = _perplexity_difference(pairs)
    else:
        difference, low, high = mean_interval(mine - their for mine, _, their, _ in pairs)
    better = sum(sign * (mine - their) > 0 for mine, _, their, _ in pairs)
    worse = sum(sign * (mine - their) < 0 for mine, _, their, _ in pairs)
    binary = all(grade in (0.0, 1.0) for mine, _, their, _ in pairs for grade in (mine, their))
    return PairedScore(
        grader=name,
        rows=len(pairs),
        mean=scaled_interval([(mine, weight) for mine, weight, _, _ in pairs], scale)[0],
        other=scaled_interval([(their, weight) for _, _, their, weight in pairs], scale)[0],
        difference=difference,
        low=low,
        high=high,
        better=better,
        worse=worse,
        p_value=mcnemar(better, worse) if binary else None,
        scale=scale,
    )


def _perplexity_difference(pairs: list[Pair]) -> tuple[float, float, float]:
    """exp(Σ nats / Σ tokens) here minus there, with its interval: rows are drawn together, or past _MOST_VALUES their
    influences on the difference are summed."""
    mine, weight, their, other = np.array(pairs).T
    logs, others = np.log(mine) * weight, np.log(their) * other
    here, there = (float(np.exp(logs.sum() / weight.sum())), float(np.exp(others.sum() / other.sum())))
    if len(pairs) > _MOST_VALUES:
        influence = here * (logs - weight * np.log(here)) / weight.sum()
        influence -= there * (others - other * np.log(there)) / other.sum()
        spread = 1.959964 * math.sqrt(float(influence @ influence))
        return here - there, here - there - spread, here - there + spread
    drawn = _draws(np.ones(len(pairs)))
    resampled = np.exp((drawn @ logs) / (drawn @ weight)) - np.exp((drawn @ others) / (drawn @ other))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return here - there, float(low), float(high)


def _scales(directory: Path) -> dict[str, Scale]:
    """The scale of each grader, by the report; empty where there is none."""
    path = directory / "report.json"
    try:
        return from_json(ScoreReport, read_text(path, follow_links=False)).scales
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error}", hint="score again") from None


def _grades(directory: Path) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(directory / "grades.jsonl", follow_links=False) as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory}: has no grades that can be read: {error}", hint="name the --out of a finished score"
        ) from None
