"""How sure a mean is, and whether two scorings of the same rows differ by more than chance.

Intervals are percentile bootstraps (Efron 1979) of 95 %. Rows with equal values are alike, so a resample is one draw
of a multinomial over the distinct values: the same distribution as drawing rows, at any number of rows.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from fitune.errors import RunDirectoryError
from fitune.files import open_regular

RESAMPLES = 2_000
_SEED = 95
_MOST_VALUES = 5_000
"""Distinct values up to which resamples are drawn; beyond them the mean is normal enough."""
_MOST_EXACT = 10_000
"""Discordant rows up to which McNemar's test is exact."""


def mean_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % interval. No values: zeros."""
    counts = Counter(values)
    total = counts.total()
    if not total:
        return 0.0, 0.0, 0.0
    seen = np.array(sorted(counts), dtype=float)
    times = np.array([counts[value] for value in seen])
    mean = float(seen @ times / total)
    if len(seen) > _MOST_VALUES:
        spread = 1.959964 * math.sqrt(float((seen - mean) ** 2 @ times)) / total
        return mean, mean - spread, mean + spread
    draws = np.random.default_rng(_SEED).multinomial(total, times / total, size=RESAMPLES) @ seen / total
    low, high = np.quantile(draws, [0.025, 0.975])
    return mean, float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Two scorings of the same rows by one grader: ``difference`` is this one minus the other, with its interval."""

    grader: str
    rows: int
    mean: float
    other: float
    difference: float
    low: float
    high: float
    better: int
    """Rows that this scoring grades higher."""
    worse: int
    p_value: float | None
    """McNemar's exact test, two-sided; None where grades are not all 0 or 1."""


def compare(directory: Path, other: Path) -> tuple[list[Paired], list[dict[str, object]]]:
    """Both scorings by every grader that both have, on the rows that both have, and the rows whose grade changed.

    Raises RunDirectoryError when a folder has no grades or nothing is common to both.
    """
    theirs = {row["id"]: row["grades"] for row in _grades(other)}
    pairs: dict[str, list[tuple[float, float]]] = {}
    changed: list[dict[str, object]] = []
    for row in _grades(directory):
        before = theirs.get(row["id"])
        if before is None:
            continue
        common = {name: (grade, before[name]) for name, grade in row["grades"].items() if name in before}
        for name, pair in common.items():
            pairs.setdefault(name, []).append(pair)
        if any(mine != their for mine, their in common.values()):
            changed.append({"id": row["id"], "grades": row["grades"], "other": before})
    if not pairs:
        raise RunDirectoryError(
            f"{directory} and {other} have no row and grader in common",
            hint="score the same data by the same grader",
        )
    return [_paired(name, found) for name, found in sorted(pairs.items())], changed


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


def _paired(name: str, pairs: list[tuple[float, float]]) -> Paired:
    differences = [mine - their for mine, their in pairs]
    difference, low, high = mean_interval(differences)
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    binary = all(grade in (0.0, 1.0) for pair in pairs for grade in pair)
    return Paired(
        grader=name,
        rows=len(pairs),
        mean=sum(mine for mine, _ in pairs) / len(pairs),
        other=sum(their for _, their in pairs) / len(pairs),
        difference=difference,
        low=low,
        high=high,
        better=better,
        worse=worse,
        p_value=mcnemar(better, worse) if binary else None,
    )


def _grades(directory: Path) -> Iterator[dict[str, dict[str, float]]]:
    try:
        with open_regular(directory / "grades.jsonl", follow_links=False) as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory}: has no grades that can be read: {error}", hint="name the --out of a finished score"
        ) from None
