"""A report in Chromium, as a file: values under the pointer, by the keyboard and on a phone; all of it is text."""

import re

import pytest

from fitune.report.methods_page import MethodRun, write_methods_page
from fitune.report.run_files import read_run
from fitune.report.run_page import write_report
from fitune.units import format_bytes, format_number
from fitune.values.predictions import Phase
from report.conftest import make_steps, measured_phases, write_run

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=document.title=1>'\""
STEPS = make_steps()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run's report and a comparison's page."""
    folder = tmp_path_factory.mktemp("reports")
    run = read_run(write_run(folder / HOSTILE.replace("/", "")))
    methods = [MethodRun(name=HOSTILE, run=run), MethodRun(name="lora", run=run)]
    return {
        "run": write_report(run.directory),
        "compare": write_methods_page(folder, methods, base_grades={}),
    }


@pytest.fixture
def opened(look, pages):
    """Opens a page as a file."""

    def open_page(name="run", **settings):
        address = pages[name].as_uri()
        return look(address, place=address, offline=True, **settings)

    return open_page


def figure(page, title):
    return page.locator("figure", has=page.locator("figcaption", has_text=title))


def point_at(page, picture, share):
    """The pointer over the picture, at that share of its width."""
    svg = picture.locator("svg")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)


def test_the_value_under_the_pointer_is_that_of_its_step(opened):
    page = opened()
    picture = figure(page, "Loss")
    line = picture.locator(".tip")
    last = f"each step {format_number(STEPS[-1].loss)}"
    assert line.inner_text().startswith(f"Step 120: {last}, running mean ")
    seen = []
    for share in (0.3, 0.5, 0.8):
        point_at(page, picture, share)
        step, loss = re.match(r"Step (\d+): each step ([\d.]+), running mean ", line.inner_text()).groups()
        assert loss == format_number(STEPS[int(step) - 1].loss)
        marks = picture.locator(".mark circle")
        assert marks.count() == 3
        middle, box = marks.first.bounding_box(), picture.locator("svg").bounding_box()
        pointer = box["x"] + share * box["width"]
        assert abs(middle["x"] + middle["width"] / 2 - pointer) < box["width"] / 120 + 1
        seen.append(int(step))
    assert seen == sorted(set(seen))
    held_out = re.search(r"held out ([\d.]+)(?: \(step (\d+)\))?", line.inner_text())
    assert held_out[1] == format_number(STEPS[int(held_out[2] or step) - 1].eval_loss)
    page.mouse.move(0, 0)
    assert line.inner_text().startswith("Step 120: ")
    assert picture.locator(".mark").count() == 0


def test_a_bar_says_its_bytes(opened):
    page = opened()
    picture = figure(page, "Memory of one step")
    bars = picture.locator("[data-tip]")
    size = measured_phases()[Phase.IDLE]
    mine = picture.locator(f"[data-tip='Between steps: {format_bytes(size)}, measured']")
    mine.locator("path").hover()
    assert picture.locator(".tip").inner_text() == mine.get_attribute("data-tip")
    picture.locator("svg").focus()
    page.keyboard.press("Home")
    assert picture.locator(".tip").inner_text() == bars.first.get_attribute("data-tip")
    page.keyboard.press("ArrowDown")
    assert picture.locator(".tip").inner_text() == bars.nth(1).get_attribute("data-tip")


def test_the_keyboard_goes_from_step_to_step(opened):
    page = opened()
    for title in ("Loss", "Throughput", "Learning rate", "Gradient norm"):
        line = figure(page, title).locator(".tip")
        while page.evaluate("document.activeElement.closest('figure')?.innerText.split('\\n')[0]") != title:
            page.keyboard.press("Tab")
        for key, step in (("ArrowLeft", 119), ("ArrowRight", 120), ("Home", 1), ("ArrowLeft", 1)):
            page.keyboard.press(key)
            assert line.inner_text().startswith(f"Step {step}: ")
        assert line.get_attribute("role") == "status"
    page.keyboard.press("Tab")
    assert line.inner_text().startswith("Step 120: ")


@pytest.mark.parametrize(("name", "scheme"), [("run", "light"), ("compare", "dark")])
def test_a_phone_shows_what_a_finger_is_on(opened, name, scheme):
    page = opened(name, viewport={"width": 390, "height": 844}, has_touch=True, color_scheme=scheme)
    picture = page.locator("figure", has=page.locator("svg[data-curves]")).first
    svg = picture.locator("svg")
    svg.scroll_into_view_if_needed()
    height = picture.bounding_box()["height"]
    svg.tap(position={"x": 120, "y": 60})
    assert re.match(r"Step \d\d: ", picture.locator(".tip").inner_text())
    assert picture.bounding_box()["height"] == height
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for head in page.get_by_role("columnheader", name="error", exact=True).all():
        place = head.bounding_box()
        assert place["x"] + place["width"] <= 375, "no table of figures is wider than the page"
    mark = "one => [getComputedStyle(one).fill, getComputedStyle(one).stroke]"
    colours = picture.locator(".mark circle").first.evaluate(mark)
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in colours]
    assert abs(light[0] - light[1]) > 0.6


def test_every_method_of_a_comparison_is_said_at_one_step(opened):
    page = opened("compare")
    assert page.locator("figure svg").count() == 4
    picture = figure(page, "Training loss")
    point_at(page, picture, 0.5)
    words = picture.locator(".tip").inner_text()
    assert re.fullmatch(r"Step \d+: (.*) ([\d.]+), lora \2", words)[1] == HOSTILE
    peaks = figure(page, "Peak of tensors")
    peaks.locator("[data-tip] path").first.hover()
    assert peaks.locator(".tip").inner_text().startswith(f"{HOSTILE}: ")
    assert page.locator("img").count() == 0
    assert page.title() != "1"
