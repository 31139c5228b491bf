"""Means with their confidence intervals, and two scorings of the same rows: the difference of their means, if it may be
chance, and the rows that changed.

Intervals are percentile bootstraps (Efron 1979) of 95 %. Rows with equal values are alike, so a resample is one draw
of a multinomial over the distinct rows: the same distribution as drawing rows. Beyond some thousand distinct rows
the mean is normal enough, and its error is that of the sum of what each row adds. A grade and its weight are two
numbers in memory for each row and grader; the rows of two scorings are brought together by their ids in a temporary
database.
"""

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fitune.errors import RunDirectoryError
from fitune.score.answers import written_rows
from fitune.score.index import open_index
from fitune.values.reports import PairedScore, Scale

_MOST_DISTINCT = 5_000
"""Distinct rows up to which resamples are drawn; beyond them the mean is normal enough."""
_NORMAL_95 = 1.959964
"""Standard errors on each side of a normal mean that hold 95 %."""
_RESAMPLES = 2_000
_DRAWN_TOGETHER = 100
"""Resamples that exist at a time: all of them, of 5,000 rows, would take 80 MB."""
_SEED = 95


def mean_interval(numbers: Any, scale: Scale = "share") -> tuple[float, float, float]:
    """The weighted mean of grades and the ends of its interval; ``numbers`` are a grade and its weight, row after row.
    Perplexities are averaged as logarithms: exp(Σ nats / Σ tokens). Without rows all are 0, of
    perplexities 1."""
    rows = np.array(numbers, dtype=float).reshape(-1, 2)
    if scale == "perplexity":
        rows[:, 0] = np.log(rows[:, 0])
    mean, (low, high) = float(_means(rows)[0]), _ends(rows)
    if scale == "perplexity":
        return math.exp(mean), math.exp(low), math.exp(high)
    return mean, low, high


def _means(rows: Any) -> Any:
    """Σ w·x / Σ w of each column; ``rows`` have value and weight of each. 0 without rows."""
    values, weights = rows[:, ::2], rows[:, 1::2]
    total = weights.sum(axis=0)
    return np.divide((weights * values).sum(axis=0), total, out=np.zeros(len(total)), where=total != 0)


def _ends(
    rows: Any, of: Callable[[Any], Any] = lambda means: means[0], slopes: Callable[[Any], Any] = np.ones_like
) -> tuple[float, float]:
    """The ends of the 95 % interval of a function ``of`` the columns' means, whose derivatives by each are
    ``slopes``."""
    means, total = _means(rows), rows[:, 1::2].sum(axis=0)
    if not total.all():
        return 0.0, 0.0
    distinct, times = np.unique(rows, axis=0, return_counts=True)
    if len(distinct) > _MOST_DISTINCT:
        # d mean = w · (x − mean) / Σ w for each row
        added = (slopes(means) * rows[:, 1::2] * (rows[:, ::2] - means) / total).sum(axis=1)
        error = _NORMAL_95 * math.sqrt(added @ added)
        return float(of(means) - error), float(of(means) + error)
    random, found = np.random.default_rng(_SEED), []
    weights, products = distinct[:, 1::2], distinct[:, ::2] * distinct[:, 1::2]
    for _ in range(_RESAMPLES // _DRAWN_TOGETHER):
        drawn = random.multinomial(len(rows), times / len(rows), size=_DRAWN_TOGETHER)
        found.append(of((drawn @ products / (drawn @ weights)).T))
    low, high = np.quantile(np.concatenate(found), [0.025, 0.975])
    return float(low), float(high)


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
    pairs: dict[str, array[float]] = {}  # grade and weight here, grade and weight there
    ours, theirs = set[str](), set[str]()
    with open_index() as others:
        others.add_texts((row["id"], line) for line, row in grades_of(other))
        for _, row in grades_of(directory):
            line = others.text(row["id"])
            if line is None:
                continue
            before = json.loads(line)
            mine, their = row["grades"], before["grades"]
            ours |= mine.keys()
            theirs |= their.keys()
            common = [name for name in mine if mine[name] is not None and their.get(name) is not None]
            for name in common:
                weights = (one.get("weights", {}).get(name, 1.0) for one in (row, before))
                numbers = zip((mine[name], their[name]), weights, strict=True)
                pairs.setdefault(name, array("d")).extend(part for pair in numbers for part in pair)
            if any(mine[name] != their[name] for name in common):
                on_changed({"id": row["id"], "grades": mine, "other": their})
    if not pairs:
        graded = (
            f"{', '.join(sorted(ours))} here, {', '.join(sorted(theirs))} there"
            if ours
            else "no id is in both"
        )
        raise RunDirectoryError(
            f"{directory} and {other} have no row and grader in common: {graded}",
            hint="score the same data by the same --grader: answers that are there are kept",
        )
    return [_paired_score(name, pairs[name], scales.get(name, "share")) for name in sorted(pairs)]


def _paired_score(grader: str, numbers: Any, scale: Scale) -> PairedScore:
    """The comparison by one grader; ``numbers`` are grade and weight here, grade and weight there, row after row.

    McNemar's p-value only where all grades are 0 or 1."""
    rows = np.asarray(numbers).reshape(-1, 4)
    apart = rows[:, 0] - rows[:, 2]
    if scale == "perplexity":
        rows[:, ::2] = np.log(rows[:, ::2])
        here, there = np.exp(_means(rows))
        difference, apart = here - there, -apart
        low, high = _ends(
            rows, lambda logs: np.exp(logs[0]) - np.exp(logs[1]), lambda logs: np.exp(logs) * (1, -1)
        )
    else:
        here, there = _means(rows)
        difference, low, high = mean_interval(np.stack([apart, np.ones(len(apart))], axis=1))
    better, worse = int((apart > 0).sum()), int((apart < 0).sum())
    is_binary = scale != "perplexity" and bool(np.isin(rows[:, ::2], (0, 1)).all())
    return PairedScore(
        grader=grader, rows=len(rows), mean=float(here), other=float(there), difference=float(difference),
        low=low, high=high, better=better, worse=worse,
        p_value=mcnemar(better, worse) if is_binary else None, scale=scale,
    )  # fmt: skip


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value that as few as min(better, worse) of the changed rows went one way by chance:
    2 · Σ C(n, i) / 2ⁿ for i up to the smaller, n = better + worse."""
    changed = better + worse
    logs = (
        math.lgamma(changed + 1)
        - math.lgamma(few + 1)
        - math.lgamma(changed - few + 1)
        - changed * math.log(2)
        for few in range(min(better, worse) + 1)
    )
    return min(1.0, 2 * sum(map(math.exp, logs)))


def grades_of(directory: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each row of grades as it is written, and read. Raises RunDirectoryError."""
    return written_rows(directory / "grades.jsonl", "id", "grades", check=_require_numbers)


def _require_numbers(row: dict[str, Any]) -> None:
    """Raises ValueError where a grade is neither a number nor None, or a weight is no number."""
    for part, kinds in (("grades", int | float | None), ("weights", int | float)):
        for name, value in row.get(part, {}).items():
            if not isinstance(value, kinds):
                raise ValueError(f"{part} of {row['id']!r:.60}: {name} is {value!r:.40}, no number")
