"""The page of a folder's runs: what the files of each say now, and nothing else of this machine."""

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest

from fitune.report.local_pages import curve_of, local_app
from fitune.session.watching import RunsFolder
from fitune.units import format_bytes, format_rate, format_seconds
from fitune.values.run_lock import lock_directory
from jsonl import read_lines
from report.conftest import make_steps, write_run
from ui.test_planner_page import text_of

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two runs: one is complete, of the other all 120 steps are written and no report yet."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pictures cost a second
    write_run(tmp_path / "runs" / "first")
    (write_run(tmp_path / "runs" / "second") / "report.json").unlink()
    return tmp_path / "runs"


@pytest.fixture
def ask(folder):
    from starlette.testclient import TestClient

    page = RunsFolder(folder)
    answers = {"runs": page.page, "runs-table": page.table, "run": page.run}
    client = TestClient(local_app(answers, token="secret"), base_url="http://127.0.0.1:8000")
    return lambda address, **question: client.get(f"/secret/{address}", params=question).text


def rows_of(html):
    """Cells by the name of the run."""
    body = html.partition("<tbody>")[2]
    rows = [
        re.findall("<t[dh].*?</t[dh]>", row, re.DOTALL) for row in re.findall("<tr>.*?</tr>", body, re.DOTALL)
    ]
    return {text_of(row[0]).split()[0]: [text_of(cell) for cell in row] for row in rows if row}


def test_each_run_says_how_far_it_is_and_how_well_it_learns(ask, folder):
    report = json.loads((folder / "first" / "report.json").read_text())
    steps = read_lines(folder / "first" / "metrics.jsonl")
    html = ask("runs")
    rows = rows_of(html)
    assert set(rows) == {"first", "second"}
    first = rows["first"]
    assert "complete 120 of 120 steps" in first[1]
    assert "demo-llama-11m · lora" in first[0]
    assert first[3] == f"{steps[0]['loss']:.3g} → {steps[-1]['loss']:.3g}"
    assert first[5] == format_bytes(max(report["memory"]["phases"].values()))
    assert first[6] == format_rate(report["tokens_per_second"])
    assert html.count("<polyline") == 2
    assert "unfinished nobody runs it" in rows["second"][1]
    assert "fitune run report" in text_of(ask("run", name="first"))


def test_the_table_follows_a_run_that_goes_on(ask, folder):
    metrics = folder / "second" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:40]))
    with lock_directory(folder / "second"):
        said = rows_of(ask("runs-table"))["second"][1]
        usual = [step.step_seconds + step.data_seconds for step in make_steps()[1:40]]
        assert "running" in said
        assert f"step 40 of 120, {format_seconds(80 * sum(usual) / 39)} left" in said
        with metrics.open("a") as file:
            file.writelines(lines[40:60])
        assert "step 60 of 120" in rows_of(ask("runs-table"))["second"][1]
        assert 'http-equiv="refresh" content="5"' in ask("run", name="second")
    assert 'http-equiv="refresh"' not in ask("run", name="second")
    shutil.rmtree(folder / "second")
    assert set(rows_of(ask("runs-table"))) == {"first"}


def test_no_other_path_is_read(ask, folder):
    write_run(folder.parent / "outside")
    (folder / "link").symlink_to(folder.parent / "outside")
    for name in ("", "..", "../outside", "/etc", "first/..", "link", HOSTILE):
        html = ask("run", name=name)
        assert f"has no run {name!r}" in unescape(html)
        assert "demo-llama-11m" not in html
        assert "<img" not in html


def test_a_damaged_run_is_said_and_the_others_are_shown(ask, folder):
    (folder / "second" / "plan.json").write_text("{")
    rows = rows_of(ask("runs-table"))
    assert "plan.json" in rows["second"][1]
    assert "complete" in rows["first"][1]
    assert "plan.json" in text_of(ask("run", name="second"))


def test_a_run_that_is_deleted_while_the_page_looks_is_said_to_be_gone(ask, folder, monkeypatch):
    seen = {file for file in folder.rglob("*") if file.is_file()}

    def looked_at(path):
        if "second" in path.parts:
            shutil.rmtree(folder / "second", ignore_errors=True)
        return path in seen

    monkeypatch.setattr(Path, "is_file", looked_at)
    rows = rows_of(ask("runs-table"))
    assert "no such run directory" in rows["second"][1]
    assert "complete" in rows["first"][1]


def test_a_folder_that_is_itself_a_run_is_shown(folder):
    assert "demo-llama-11m" in RunsFolder(folder / "first").table({})
    assert "demo-llama-11m" in RunsFolder(folder / "first").run({"name": "."})


def test_names_are_escaped(ask, folder):
    (folder / "first").rename(folder / HOSTILE.replace("/", ""))
    html = ask("runs")
    assert "<img" not in html
    assert urlencode({"name": HOSTILE}) in html


def test_an_empty_folder_says_what_fills_it(tmp_path):
    assert "No run is in" in RunsFolder(tmp_path).table({})


@pytest.mark.parametrize(
    ("points", "drawn"),
    [
        ([(1, 2.0), (2, 1.0), (3, 1.5)], "0.0,1.0 50.0,29.0 100.0,15.0"),
        ([(1, 2.0), (2, float("nan")), (3, 2.0)], "0.0,29.0 100.0,29.0"),
        ([(1, 2.0), (2, float("inf"))], ""),
        ([], ""),
    ],
)
def test_a_curve_has_its_highest_value_at_the_top(points, drawn):
    assert curve_of(points) == drawn
