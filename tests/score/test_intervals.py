"""Intervals cover what they promise, and two scorings are compared row by row."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from fitune.errors import RunDirectoryError
from fitune.score.grades.intervals import mcnemar, mean_interval, paired_scores
from jsonl import write_lines


def alike(values):
    """Grades that weigh the same."""
    return [part for value in values for part in (value, 1.0)]


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """300 samples of 200 answers of which 30 % are right: 95 % of the intervals hold 0.3, within 4 sigma."""
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        _, low, high = mean_interval(alike(draw.random(200) < 0.3))
        held += low <= 0.3 <= high
    assert abs(held - 0.95 * 300) < 4 * math.sqrt(300 * 0.95 * 0.05)


def test_the_interval_of_equal_values_is_a_point_and_of_many_values_is_normal():
    assert mean_interval(alike([0.5] * 7)) == (0.5, 0.5, 0.5)
    assert mean_interval([]) == (0.0, 0.0, 0.0)
    values = np.random.default_rng(1).random(20_000).tolist()
    mean, low, high = mean_interval(alike(values))
    expected = 1.96 * float(np.std(values)) / math.sqrt(len(values))
    assert high - mean == pytest.approx(expected, rel=0.01) == mean - low


@pytest.mark.parametrize(
    ("better", "worse", "p"), [(0, 0, 1.0), (5, 5, 1.0), (8, 1, 0.0390625), (0, 5, 0.0625)]
)
def test_mcnemar_is_the_two_sided_binomial(better, worse, p):
    assert mcnemar(better, worse) == mcnemar(worse, better) == pytest.approx(p)


def test_mcnemar_is_finite_for_many_rows():
    normal = 2 * NormalDist(50_000, math.sqrt(100_000) / 2).cdf(49_700.5)
    assert mcnemar(50_300, 49_700) == pytest.approx(normal, rel=1e-3)
    assert 0 < mcnemar(3000, 2000) < 1e-30


def write_grades(folder, grades):
    folder.mkdir()
    rows = [{"id": id_, "expected": "", "grades": {"exact_match": grade}} for id_, grade in grades.items()]
    return write_lines(folder / "grades.jsonl", rows).parent


def test_two_scorings_are_compared_on_the_rows_of_both(tmp_path):
    mine = write_grades(tmp_path / "a", {"1": 1.0, "2": 1.0, "3": 0.0, "4": 1.0, "new": 1.0})
    other = write_grades(tmp_path / "b", {"4": 1.0, "3": 1.0, "2": 0.0, "1": 0.0, "old": 0.0})
    changed = []
    (found,) = paired_scores(mine, other, on_changed=changed.append)
    assert (found.rows, found.mean, found.other, found.difference) == (4, 0.75, 0.5, 0.25)
    assert (found.better, found.worse, found.p_value) == (2, 1, pytest.approx(1.0))
    assert found.low < 0.25 < found.high
    assert [row["id"] for row in changed] == ["1", "2", "3"]
    with pytest.raises(RunDirectoryError, match="no row and grader in common"):
        paired_scores(mine, write_grades(tmp_path / "c", {"9": 1.0}))
    write_lines(tmp_path / "c" / "grades.jsonl", [{"id": "1", "grades": {"f1": 0.5}}])
    with pytest.raises(RunDirectoryError, match="common: exact_match here, f1 there"):
        paired_scores(mine, tmp_path / "c")
    with pytest.raises(RunDirectoryError, match="has no grades that can be read"):
        paired_scores(mine, tmp_path / "nowhere")
    for damage in (
        b"[]\n", b'{"id": 1, "grades": {}}\n', b'{"id": "2", "grades": []}\n',
        b'{"id": "2", "grades": {"exact_match": "high"}}\n',
        b'{"id": "2", "grades": {"exact_match": 1}, "weights": {"exact_match": null}}\n',
    ):  # fmt: skip
        with (other / "grades.jsonl").open("ab") as file:
            file.write(damage)
        with pytest.raises(RunDirectoryError, match="has no grades that can be read"):
            paired_scores(mine, other)
        write_lines(other / "grades.jsonl", [{"id": "1", "grades": {"exact_match": 1.0}}])
