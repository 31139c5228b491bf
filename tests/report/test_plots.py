"""Pictures: the numbers given are the numbers drawn, nothing hides a value, nothing is loaded from outside."""

import dataclasses
import json
import math
import re
import warnings
from functools import cache
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from fitune.report import comparison_plots, plots, run_plots
from fitune.report.compare import compare
from fitune.report.plots import SERIES
from fitune.units import format_number
from fitune.values.predictions import Phase
from report.conftest import make_steps

pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib")
MIB = 1024**2


def texts(svg):
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("text")]


@cache
def usual_loss():
    """The loss of a run that went well, drawn once."""
    return run_plots.loss_curve(make_steps())


def pictures_of(steps, *, predicted):
    return [
        run_plots.loss_curve(steps), run_plots.learning_rate_curve(steps),
        run_plots.throughput_curve(steps, predicted=predicted), run_plots.grad_norm_curve(steps, clipped_at=1.0),
    ]  # fmt: skip


def test_bars_carry_the_predicted_and_the_measured_bytes(prediction):
    measured = {Phase.IDLE: 50 * MIB, Phase.BACKWARD: 405 * MIB}
    found = texts(run_plots.memory_bars(prediction.estimate, measured))
    assert {"412.0 MiB", "405.0 MiB", "50.0 MiB", "309.0 MiB"} <= set(found)
    assert {"weights", "block inputs", "measured", "Between steps", "Update"} <= set(found)


def test_bars_are_as_long_as_their_bytes(prediction):
    """Pixels per byte are one number over all terms, and the terms of a phase stand end to end."""
    svg = run_plots.memory_bars(prediction.estimate, {Phase.BACKWARD: 412 * MIB})
    found = re.findall(
        r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+)[^"]*" clip-path="[^"]*" style="fill: var\(--([\w-]+)\)', svg
    )
    bars = [(name, float(left), float(right)) for left, right, name in found]
    weights, measured = (
        next(right - left for name, left, right in bars if name == wanted) for wanted in ("series-1", "ink")
    )
    assert measured / weights == pytest.approx(412 / 43, rel=1e-3)
    stack, ink = (max(right for name, _, right in bars if (name == "ink") is one) for one in (False, True))
    assert stack == pytest.approx(ink)  # 412 MiB in both


def test_colours_are_variables_of_the_page_and_ids_are_not_repeated(prediction, steps):
    pictures = [run_plots.memory_bars(prediction.estimate, {}), *pictures_of(steps, predicted=2000.0)]
    for svg in pictures:
        assert "var(--series-" in svg
        assert not re.search(r"#[0-9a-f]{6}\b|http|font-family", svg)
    ids = [found for svg in pictures for found in set(re.findall(r'\sid="([^"]*)"', svg))]
    assert len(ids) == len(set(ids))
    assert pictures[1] == usual_loss(), "the same run gives the same picture"


def test_the_shortest_run_draws_without_a_warning(steps):
    few = [dataclasses.replace(steps[0], learning_rate=0.0, grad_norm=math.nan)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for svg in (run_plots.memory_bars(None, {Phase.IDLE: 0}), *pictures_of(few, predicted=None)):
            ElementTree.fromstring(svg)


def test_folding_keeps_the_sums():
    phases = {
        Phase.FORWARD: {f"term {n}": 2**n for n in range(12)},
        Phase.BACKWARD: {f"term {n}": 3 * n + 1 for n in range(5, 14)},
    }
    folded = run_plots.fold_small_terms(phases)
    assert len({name for terms in folded.values() for name in terms}) == SERIES
    sums, before = ({p: sum(terms.values()) for p, terms in each.items()} for each in (folded, phases))
    assert sums == before


def test_thinning_keeps_the_spike_and_the_order():
    points = [(step, 1.0) for step in range(100_000)]
    points[54_321:54_323] = spikes = [(54_321, 9.0), (54_322, -9.0)]
    thinned = plots.thin(points)
    assert len(thinned) <= 602
    assert {*spikes} <= {*thinned}
    assert thinned == sorted(thinned)


def test_points_to_point_at_are_even_and_keep_the_ends_and_the_extremes():
    points = [(step, math.sin(step)) for step in range(1, 10_001)]
    points[54], points[5_678] = (55, 9.0), (5_679, -9.0)
    thinned = plots.thin_evenly(points)
    assert len(thinned) <= 400
    assert {points[place] for place in (0, -1, 54, 5_678)} <= set(thinned)
    assert all(0 < after - before <= 26 for (before, _), (after, _) in pairwise(thinned))
    assert plots.thin_evenly(points[:400]) == points[:400]


def pointed_at(svg):
    return json.loads(ElementTree.fromstring(svg).get("data-curves"))


@pytest.mark.parametrize("loss", [1.0, 9.0], ids=["linear", "logarithmic"])
def test_a_point_to_point_at_lies_on_the_line_that_is_drawn(steps, loss):
    few = [dataclasses.replace(step, eval_loss=None) for step in steps[:20]]
    few[3] = dataclasses.replace(few[3], loss=loss)
    svg = run_plots.loss_curve(few)
    drawn = re.search(r'<path d="([^"]*)"[^>]*style="[^"]*stroke: var\(--series-1\); stroke-width: 1.6', svg)
    ends = [tuple(map(float, pair)) for pair in re.findall(r"[ML] ([\d.]+) ([\d.]+)", drawn[1])]
    data = pointed_at(svg)
    [[name, points]] = data["curves"]
    assert name == "training"
    assert [(step, words) for step, _, words in points] == [
        (one.step, format_number(one.loss)) for one in few
    ]
    for (x, y), (step, top, _) in zip(ends, points, strict=True):
        assert data["at"] + data["scale"] * step == pytest.approx(x, abs=0.01)
        assert top == pytest.approx(y, abs=0.06)
        assert data["top"] <= top <= data["bottom"]


def test_a_value_that_is_not_finite_gets_a_mark_and_is_not_among_those_to_point_at(steps):
    assert "not finite" not in texts(usual_loss())
    broken = [*steps[:-1], dataclasses.replace(steps[-1], loss=math.nan, grad_norm=math.inf)]
    svg = run_plots.loss_curve(broken)
    assert "not finite" in texts(svg)
    assert "not finite" in texts(run_plots.grad_norm_curve(broken, clipped_at=0))
    label = ElementTree.fromstring(svg).get("aria-label")
    assert f"each step {format_number(steps[-2].loss)} in step 119" in label
    assert f"held out {format_number(steps[-1].eval_loss)} in step 120" in label
    assert max(step for step, _, _ in dict(pointed_at(svg)["curves"])["each step"]) == 119
    nothing = [dataclasses.replace(step, grad_norm=math.nan) for step in steps]
    assert "data-curves" not in run_plots.grad_norm_curve(nothing, clipped_at=0)


HOSTILE = """'"><img src=x onerror=alert(1)></svg><script>"""


def test_a_name_of_a_method_or_a_term_stays_text(steps, plan, prediction, run_report):
    memory = dataclasses.replace(prediction.estimate.memory, phases={Phase.FORWARD: {HOSTILE: 3 * MIB}})
    peak = compare(prediction.estimate, run_report)[0]
    bars = run_plots.memory_bars(dataclasses.replace(prediction.estimate, memory=memory), {})
    curves = comparison_plots.loss_curves({HOSTILE: steps}, {HOSTILE: plan})
    peaks = comparison_plots.method_bars({HOSTILE: peak}, name="peaks", label="Peaks")
    for svg in (bars, curves, peaks):
        assert not {"img", "script"} & {node.tag for node in ElementTree.fromstring(svg).iter()}
    tips = [node.get("data-tip") for node in ElementTree.fromstring(bars).iter() if node.get("data-tip")]
    assert tips == [f"Forward: {HOSTILE} 3.0 MiB, predicted"]
    assert pointed_at(curves)["curves"][0][0] == HOSTILE


def test_the_running_mean_of_a_straight_line_is_that_line():
    line = [(step, 3.0 - 0.01 * step) for step in range(200)]
    smooth = run_plots.running_mean(line)
    assert [value for _, value in smooth] == pytest.approx([value for _, value in line])
    assert run_plots.running_mean([(1, math.nan), (2, 2.0)]) == [(2, 2.0)]
