"""Two scorings of the same rows: the difference of their means, if it may be chance, and the rows that changed.

Rows are brought together by their ids in a temporary database, so memory does not grow with the rows.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from fitune.errors import RunDirectoryError
from fitune.files import open_regular, read_text
from fitune.score.grades.intervals import MOST_VALUES, NORMAL_95, Moments, WeightedMean, resampled_ends
from fitune.score.index import open_index
from fitune.spec.reports import PairedScore, Scale, ScoreReport
from fitune.spec.serial import from_json

_MOST_EXACT = 10_000
"""Discordant rows up to which McNemar's test is exact."""

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
    """The interval of a difference of two perplexities. Rows are drawn together; past MOST_VALUES their influences on
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
            if len(self._few) > MOST_VALUES:
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
            spread = NORMAL_95 * self._moments.root(factors)
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
