"""The planner's page in Chromium: typing, pointing, sorting, links, a phone, the dark, the keyboard, labels."""

import re
import socket
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

import pytest

from report.conftest import write_run
from ui.test_planner_page import PLAN

pytestmark = pytest.mark.browser
QUESTION = "?model=gpt2&gpu=rtx-4090&tuning=lora&rows=1000"
"""Its answer takes half a second of the processor's time; with all methods and a larger model it takes three."""
LONG = "?model=Qwen%2FQwen2.5-1.5B&gpu=rtx-4090&gpus=2&rows=1000"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    (write_run(folder / "second") / "report.json").unlink()
    return folder


@pytest.fixture
def opened(look, address):
    """Opens the page with a query."""

    def open_page(query=QUESTION, *, wait=True, **settings):
        page = look(address + query, place=address, **settings)
        if wait:
            page.wait_for_selector("#ways table")
        return page

    return open_page


def test_typing_asks_and_the_address_holds_the_question(opened):
    page = opened("", wait=False)
    page.get_by_label("Model", exact=True).fill("gpt2")
    page.get_by_label("Card", exact=True).fill("rtx-4090")
    page.get_by_text("✔ FITS", exact=True).wait_for()
    page.wait_for_selector("#ways table")
    assert parse_qs(urlsplit(page.url).query) == {"model": ["gpt2"], "gpu": ["rtx-4090"]}
    page.get_by_label("Method").select_option("qlora")
    page.locator("#command", has_text="--tuning qlora").wait_for()
    assert page.locator("datalist#model-names option").count() > 300


@pytest.fixture(scope="module")
def server():
    """Starts `fitune ui` with words, and ends it; gives the process and the address that it prints."""
    started = []

    def start(*words):
        command = [sys.executable, "-m", "fitune", "ui", *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(server, runs):
    return server("--runs", runs)[1]


def test_a_link_of_a_page_that_was_closed_is_opened_again(browser, server):
    def said_by(page):
        page.wait_for_selector("#ways table")
        return page.locator("#answer").inner_text()

    old, address = server()
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto(link := address + QUESTION)
    said = said_by(page)
    old.kill()
    page.get_by_label("Rows of data").fill("2000")
    page.get_by_text("fitune ui 'THE ADDRESS OF THIS PAGE'").wait_for()
    _, again = server(link)
    assert urlsplit(again).query == urlsplit(link).query
    assert urlsplit(again).path != urlsplit(link).path
    page.goto(again)
    assert said_by(page) == said
    page.goto(urlsplit(again)._replace(path=urlsplit(link).path).geturl())  # the old token
    assert "fitune ui 'THE LINK'" in page.inner_text("body")
    page.close()


def test_pointing_at_a_bar_says_its_bytes(opened):
    page = opened()
    bar = page.locator(".bars rect").first
    bar.hover()
    said = page.locator(".tip").first.inner_text()
    assert said == bar.get_attribute("data-tip")
    assert re.fullmatch(r"\w+: [\w ,]+ [\d.]+ [GM]iB of [\d.]+ [GM]iB", said)


def test_a_head_sorts_both_ways_by_number(opened):
    page = opened()
    head = page.get_by_role("columnheader", name="memory")
    cells = page.locator(".sortable tbody tr td:nth-child(4)")
    for order, is_reverse in (("ascending", False), ("descending", True)):
        head.get_by_role("button").click()
        sizes = [int(cell.get_attribute("data-value")) for cell in cells.all()]
        assert sizes == sorted(sizes, reverse=is_reverse)
        assert head.get_attribute("aria-sort") == order
    assert len(set(sizes)) > 1


def test_the_keyboard_alone_is_enough(opened):
    page = opened()
    page.get_by_label("Card", exact=True).focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("h100")
    page.locator("#command", has_text="--gpu h100").wait_for()
    page.wait_for_selector("#ways[aria-busy=false]", state="attached")
    reached, focused = [], "document.activeElement.className || document.activeElement.textContent.trim()"
    while "memory" not in reached:
        assert len(reached) < 60
        page.keyboard.press("Tab")
        reached.append(page.evaluate(focused))
    assert {"row", "Copy link", "Copy command", "Copy recipe"} <= {*reached}
    assert "GiB" in page.locator(".tip").first.inner_text()
    page.keyboard.press("Enter")
    assert page.get_by_role("columnheader", name="memory").get_attribute("aria-sort") == "ascending"


def test_everything_has_a_name_for_those_who_do_not_see_it(opened):
    page = opened()
    unnamed = page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button, svg[role=img]")].filter(
            (one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.locator("#answer").get_attribute("aria-live") == "polite"
    assert page.locator("h1").count() == 1


@pytest.mark.parametrize(
    ("query", "last"),
    [
        (LONG + "&fleet=clusters: [{name: ada, gpu: rtx-4090}]", "#clusters table"),
        ("?model=meta-llama%2FLlama-3.1-70B&gpu=rtx-4090&tuning=full", "#clusters[aria-busy=false]"),
        ("runs", "#runs table"),
    ],
)
def test_a_phone_shows_every_number_without_sideways_scrolling(opened, query, last):
    page = opened(query, wait=False, viewport={"width": 390, "height": 844})
    page.wait_for_selector(last, state="attached")  # clusters are asked for last
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    hidden = page.evaluate(
        """[...document.querySelectorAll("th, td")].filter((cell) => {
            const { left, right } = cell.getBoundingClientRect();
            return left < 0 || right > 390 || cell.scrollWidth > cell.clientWidth;
        }).map((cell) => cell.outerHTML)"""
    )
    assert hidden == []
    if "fleet" in query:
        head = page.locator("#ways").get_by_role("columnheader", name="speed")
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == "ascending"


def test_the_words_of_a_choice_are_seen_whole(opened):
    page = opened("", wait=False)
    choice = page.get_by_label("Method")
    for width in (390, 770, 1200):
        page.set_viewport_size({"width": width, "height": 844})
        needed, given = choice.evaluate(
            """one => ["max-content", ""].map((width) => { one.style.width = width; return one.offsetWidth; })"""
        )
        assert needed <= given, width


def test_the_dark_is_dark(opened):
    page, lightness = opened("", wait=False), {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness[scheme] = sum(int(part) for part in re.findall(r"\d+", colour)[:3])
    assert lightness["light"] > 600
    assert lightness["dark"] < 150


def test_a_hostile_name_is_text(opened):
    page = opened("?model=%3Cimg%20src%3Dx%20onerror%3Ddocument.title%3D1%3E&gpu=h100", wait=False)
    page.get_by_role("alert").wait_for()
    assert "<img src=x" in page.get_by_role("alert").inner_text()
    assert page.locator("#answer img").count() == 0
    assert page.title() == "fitune: what fits"


def test_cards_to_rent_come_one_after_the_other_and_sort_by_cost(opened):
    page = opened()
    page.locator("#rent").evaluate("button => { button.dataset.cards = 't4 rtx-3090'; }")  # two of 26
    page.locator("#rent").click()
    page.locator("#offers tbody tr").nth(5).wait_for()
    from playwright.sync_api import expect  # there, since the page is open

    expect(page.locator("#renting")).to_have_text("", timeout=60_000)
    page.locator("#offers").get_by_role("button", name="cost").click()
    costs = [
        float(cell.get_attribute("data-value")) for cell in page.locator("#offers td:nth-child(6)").all()
    ]
    assert costs == sorted(costs)
    page.get_by_label("Rows of data").fill("2000")
    page.locator("#offers").wait_for(state="hidden")


def test_a_pasted_fleet_is_a_table_that_sorts_and_a_part_of_the_link(opened):
    page = opened()
    page.get_by_text("Your own clusters").click()
    fleet = "clusters:\n- {name: tiny, gpu: t4, disk: 1GB}\n- {name: <b>x, gpu: h100, gpus: 8, price: 3}\n"
    page.get_by_label("Method").select_option("full")
    page.get_by_label("Fleet file").fill(fleet + "- {name: ada, gpu: rtx-4090, gpus: 4, price: 0.3}\n")
    rows = page.locator("#clusters tbody tr")
    rows.nth(2).wait_for()
    assert "<b>x" in rows.nth(0).inner_text()
    assert rows.nth(2).inner_text().startswith("✘ tiny")
    again = opened("?" + urlsplit(page.url).query)
    again.wait_for_selector("#clusters table")
    assert again.locator("#clusters").inner_text() == page.locator("#clusters").inner_text()
    page.locator("#clusters").get_by_role("button", name="devices").click()
    assert "ada" in rows.nth(0).inner_text()
    assert rows.nth(2).inner_text().startswith("✘ tiny")
    page.get_by_label("Fleet file").fill(fleet + "- {")
    page.locator("#clusters").get_by_role("alert").filter(has_text="the pasted fleet file:4:").wait_for()
    page.get_by_label("Fleet file").fill("")
    page.locator("#clusters section").wait_for(state="detached")


def test_the_runs_are_a_page_that_follows_them(opened, runs):
    page = opened("", wait=False)
    page.clock.install()
    page.get_by_role("link", name="Runs").click()
    page.get_by_role("row", name="second").get_by_text("unfinished").wait_for()
    assert page.locator("polyline").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    write_run(runs / "third")
    page.clock.fast_forward(5000)
    page.get_by_role("link", name="third").wait_for()  # without a click: the table comes anew
    page.get_by_role("link", name="first").click()
    page.get_by_text("fitune run report").wait_for()


def test_the_server_listens_on_this_machine_alone(address):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", urlsplit(address).port), timeout=1)


def test_a_file_sorts_and_tells_without_a_server(look, call, tmp_path):
    path = tmp_path / "plan.html"
    call(*PLAN, "--html", path).ends(0)
    page = look(path.as_uri(), place=path.as_uri(), offline=True)
    page.get_by_role("columnheader", name="speed").get_by_role("button").click()
    assert page.get_by_role("columnheader", name="speed").get_attribute("aria-sort") == "ascending"
    page.locator(".bars rect").first.hover()
    assert "GiB" in page.locator(".tip").first.inner_text()
