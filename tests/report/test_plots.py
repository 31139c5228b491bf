"""Pictures: the numbers given are the numbers drawn, nothing hides a value, nothing is loaded from outside."""

import dataclasses
import math
import re
import sys
import warnings
from xml.etree import ElementTree

import pytest

from fitune.errors import MissingExtra
from fitune.report import plots, run_plots
from fitune.report.plots import SERIES
from fitune.spec.predictions import Phase
from fitune.units import format_bytes

MIB = 1024**2


@pytest.fixture(autouse=True)
def with_matplotlib(request):
    if "without" not in request.node.name:
        pytest.importorskip("matplotlib")


def texts(svg):
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("text")]


def test_bars_carry_the_predicted_and_the_measured_bytes(prediction):
    measured = {Phase.IDLE: 50 * MIB, Phase.BACKWARD: 405 * MIB}
    found = texts(run_plots.memory_bars(prediction.estimate, measured))
    assert {"412.0 MiB", "405.0 MiB", "50.0 MiB", "309.0 MiB"} <= set(found)
    assert {"weights", "block inputs", "measured", "Between steps", "Update"} <= set(found)


def test_bars_are_as_long_as_their_bytes(prediction):
    """Pixels per byte are one number over all terms, and the terms of a phase stand end to end."""
    svg = run_plots.memory_bars(prediction.estimate, {Phase.BACKWARD: 412 * MIB})
    bars = re.findall(
        r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+)[^"]*" clip-path="[^"]*" style="fill: var\(--([\w-]+)\)', svg
    )
    lengths = [(name, float(right) - float(left)) for left, right, name in bars]
    weights, measured = (
        next(length for name, length in lengths if name == wanted) for wanted in ("series-1", "ink")
    )
    assert measured / weights == pytest.approx(412 / 43, rel=1e-3)
    ends = [(name, float(right)) for _, right, name in bars]
    stack_end = max(end for name, end in ends if name != "ink")
    assert stack_end == pytest.approx(max(end for name, end in ends if name == "ink"))  # 412 MiB in both


def test_colours_are_variables_of_the_page_and_ids_are_not_repeated(prediction, steps):
    pictures = [
        run_plots.memory_bars(prediction.estimate, {}),
        run_plots.loss_curve(steps),
        run_plots.learning_rate_curve(steps),
        run_plots.throughput_curve(steps, predicted=2000.0),
        run_plots.grad_norm_curve(steps, clipped_at=1.0),
    ]
    for svg in pictures:
        assert "var(--series-" in svg
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        assert "http" not in svg
        assert "font-family" not in svg
    ids = [found for svg in pictures for found in set(re.findall(r'\sid="([^"]*)"', svg))]
    assert len(ids) == len(set(ids))


def test_the_same_run_gives_the_same_picture(steps):
    assert run_plots.loss_curve(steps) == run_plots.loss_curve(steps)


def test_a_value_that_is_not_finite_gets_a_mark(steps):
    assert "not finite" not in texts(run_plots.loss_curve(steps))
    broken = [*steps[:-1], dataclasses.replace(steps[-1], loss=math.nan, grad_norm=math.inf)]
    assert "not finite" in texts(run_plots.loss_curve(broken))
    assert "not finite" in texts(run_plots.grad_norm_curve(broken, clipped_at=0))


@pytest.mark.parametrize("count", [1, 2])
def test_the_shortest_run_draws_without_a_warning(steps, count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = [dataclasses.replace(step, learning_rate=0.0, grad_norm=math.nan) for step in steps[:count]]
        for svg in (
            run_plots.loss_curve(few),
            run_plots.learning_rate_curve(few),
            run_plots.throughput_curve(few, predicted=None),
            run_plots.grad_norm_curve(few, clipped_at=1.0),
            run_plots.memory_bars(None, {Phase.IDLE: 0}),
        ):
            ElementTree.fromstring(svg)


def test_folding_keeps_the_sums():
    phases = {
        Phase.FORWARD: {f"term {n}": 2**n for n in range(12)},
        Phase.BACKWARD: {f"term {n}": 3 * n + 1 for n in range(5, 14)},
    }
    folded = run_plots.fold_small_terms(phases)
    names = {name for terms in folded.values() for name in terms}
    assert len(names) == SERIES
    assert {p: sum(t.values()) for p, t in folded.items()} == {p: sum(t.values()) for p, t in phases.items()}


def test_thinning_keeps_the_spike_and_the_order():
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    points[54_322] = (54_322, -9.0)
    thinned = plots.thin(points)
    assert len(thinned) <= 602
    assert (54_321, 9.0) in thinned
    assert (54_322, -9.0) in thinned
    assert thinned == sorted(thinned)


def test_the_running_mean_of_a_straight_line_is_that_line():
    line = [(step, 3.0 - 0.01 * step) for step in range(200)]
    for (_, smooth), (_, value) in zip(run_plots.running_mean(line), line, strict=True):
        assert smooth == pytest.approx(value)
    assert run_plots.running_mean([(1, math.nan), (2, 2.0)]) == [(2, 2.0)]


def test_without_matplotlib_the_command_is_named(steps, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"fitune\[plots\]"):
        run_plots.loss_curve(steps)


def test_the_axis_unit_follows_the_largest_bar(prediction):
    assert "GiB" in texts(run_plots.memory_bars(None, {Phase.IDLE: 3 * 1024 * MIB}))
    assert "bytes" in texts(run_plots.memory_bars(None, {Phase.IDLE: 12}))
    assert format_bytes(12) in texts(run_plots.memory_bars(None, {Phase.IDLE: 12}))
