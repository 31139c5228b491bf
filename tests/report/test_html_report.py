"""report.html: self-contained, escaped, the same numbers as the files, and there for every kind of run."""

import base64
import dataclasses
import hashlib
import os
import re
import sys
from html.parser import HTMLParser

import pytest
from markupsafe import escape

from fitune.report.run_page import write_report
from fitune.values.predictions import Rejection
from fitune.values.reports import Sample
from fitune.values.serial import to_json

pytestmark = pytest.mark.pictures

_VOID = {"meta"}


class Page(HTMLParser):
    """The text people read, the tags, and whether every tag was closed."""

    def __init__(self, path):
        super().__init__()
        self.open = []
        self.tags = []
        self.links = []
        self.words = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "data")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures cost a second; what is tested without them does not need them."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_page_is_whole_and_loads_nothing(run_directory):
    pytest.importorskip("matplotlib")
    page = Page(write_report(run_directory))
    assert page.tags.count("svg") == 5
    assert page.tags.count("script") == 1
    digest = hashlib.sha256(re.search("<script>(.*)</script>", page.source, re.DOTALL)[1].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'\">" in page.source
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"https?:|@import|url\((?!#)", page.source)
    assert "prefers-color-scheme: dark" in page.source
    assert 'name="viewport"' in page.source
    assert [file.name for file in run_directory.glob("report.html*")] == ["report.html"]


@pytest.mark.usefixtures("no_pictures")
def test_the_numbers_are_those_of_the_files(run_directory):
    page = Page(write_report(run_directory))
    for expected in (
        "Predicted 412.0 MiB, measured 405.0 MiB (+1.7 %)",
        "Peak of tensors 412.0 MiB 405.0 MiB +1.7 %",
        "Throughput 2,133 tokens/s 2,156 tokens/s -1.1 %",
        "from 4.098 in the first step to 1.242 in the last; at best 1.330",
        "4 min 3 s 120 of 120 steps",
        "786 K 7.0 % of parameters",
        "Forward compute 610 ms",
        "LoRA r16, recompute 8 of 8 190.0 MiB 2.31 s yes",
        "10 B × 2,048 tokens × 4,096 words = 80.0 MiB of logits",
        "Read 2,000 163,402",
        "Read 105 163,402",
        "Kept 1,986 160,730",
        "gradient_checkpointing: 4 of 8 blocks",
        "pip install fitune==0.1.0",
        "transformers 5.23.0",
        "lora_r: 16",
        "The capital of Ardenia is Velm.",
        "No pictures in the report: pip install 'fitune[plots]'",
    ):
        assert expected in page.text
    assert "svg" not in page.tags


@pytest.mark.usefixtures("no_pictures")
def test_nothing_a_user_wrote_becomes_markup(run_directory, plan, prediction, run_report, change_report):
    bad = '<script>alert("x")</script><img src=x onerror=y>$title'
    model = dataclasses.replace(plan.model, name=bad)
    (run_directory / "plan.json").write_text(to_json(dataclasses.replace(plan, model=model, model_path=bad)))
    (run_directory / "recipe.yaml").write_text(f"# {bad}\n")
    runner_up = dataclasses.replace(prediction.runners_up[0], summary=bad)
    prediction = dataclasses.replace(
        prediction, decisions=(bad,), rejected=(Rejection(what=bad, why=bad),), runners_up=(runner_up,)
    )
    (run_directory / "estimate.json").write_text(to_json(prediction))
    change_report(
        status="failed", reason=bad, exported=bad, versions={"fitune": bad, bad: bad},
        samples=(Sample(prompt=bad, expected=bad, before=bad, after=bad),),
        train_data=dataclasses.replace(run_report.train_data, dropped={bad: 14}, formats=(bad,)),
    )  # fmt: skip
    page = Page(write_report(run_directory))
    assert not {"script", "img"} & {*page.tags}
    assert page.source.count(str(escape(bad))) >= 15
    assert bad not in page.source


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["report.json"], ("Predicted 412.0 MiB, measured 405.0 MiB (+1.7 %)", "120 of 120 steps")),
        (
            ["report.json", "estimate.json", "metrics.jsonl", "recipe.yaml"],
            ("Memory was neither predicted nor measured.", "No step was recorded."),
        ),
    ],
)
def test_a_run_that_is_still_going_has_a_page(run_directory, missing, said, request):
    for name in missing:
        (run_directory / name).unlink()
    if len(missing) == 1:  # of a plan alone there is nothing to draw
        request.getfixturevalue("no_pictures")
    page = Page(write_report(run_directory))
    assert "unfinished" in page.text
    assert "There is no report.json" in page.text
    assert all(words in page.text for words in said)
    assert "svg" not in page.tags


@pytest.mark.usefixtures("no_pictures")
def test_a_failed_run_says_why_and_shows_the_loss_as_it_was(change_report):
    reason = "step 47: the loss is not finite"
    directory = change_report(status="failed", reason=reason, final_loss=float("nan"), steps=47, memory=None)
    text = Page(write_report(directory)).text
    for words in (reason, "4.10 → nan", "47 of 120 steps"):
        assert words in text


@pytest.mark.usefixtures("no_pictures")
def test_a_page_that_cannot_be_written_keeps_the_old_one(run_directory, monkeypatch):
    path = write_report(run_directory)
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match=r"report\.html: cannot be written"):
        write_report(run_directory)
    assert path.read_text() == before
