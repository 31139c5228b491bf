"""Times of several processes in the report, and steps that took much longer than the others."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fitune.report.run_words import long_steps, rank_rows
from fitune.train.peers import rows_of_ranks
from fitune.values.reports import RankReport


def rank(number, waiting, **more):
    return RankReport(rank=number, memory={}, step_seconds=2.0, waiting_seconds=waiting, **more)


def test_a_rank_is_busy_when_it_is_in_no_collective():
    [row] = rank_rows([rank(1, 0.5, busiest_step=3, busiest_seconds=1.75)])
    assert row[0] == "rank 1"
    assert row[3:] == ("1.50 s (75.0 %)", "500 ms", "1.75 s in step 3")


def test_times_that_nobody_measured_are_not_shown():
    assert rank_rows([RankReport(rank=0, memory={}, step_seconds=1.0)]) == []


def test_the_busiest_step_is_the_longest_without_its_waiting_and_not_the_first(steps):
    times = [(9.0, 0.0), (5.0, 0.1), (6.0, 4.0)]
    done = [
        replace(step, step_seconds=seconds, waiting_seconds=waiting)
        for step, (seconds, waiting) in zip(steps, times, strict=False)
    ]
    ranks = SimpleNamespace(is_alone=False, rank=1, gathered=lambda own: [own])
    (row,) = rows_of_ranks(SimpleNamespace(ranks=ranks, done=done))
    assert (row.busiest_step, row.busiest_seconds) == (2, pytest.approx(4.9))
    assert (row.step_seconds, row.waiting_seconds) == (5.5, pytest.approx(2.05))


def test_a_long_step_is_told_with_the_throughput_of_the_others(steps, run_report):
    usual = [replace(step, step_seconds=0.1, tokens=100, memory_bytes={}) for step in steps[:9]]
    assert long_steps(usual, run_report) == []
    usual[4] = replace(usual[4], step_seconds=10.0)
    slow, quick = (
        rank(1, 0.1, busiest_step=5, busiest_seconds=9.9),
        rank(0, 1.9, busiest_step=2, busiest_seconds=0.1),
    )
    said = "step 5 took 10.0 s, and the median is 100 ms"
    assert long_steps(usual, replace(run_report, ranks=(quick, slow))) == [
        f"{said}: rank 1 was slow, and the others waited for it",
        "throughput holds it; without, it is 1,000 tokens/s",
    ]
    assert long_steps(usual, replace(run_report, ranks=()))[0] == said
