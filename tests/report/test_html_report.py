"""report.html: self-contained, escaped, the same numbers as the files, and there for every kind of run."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import sys
from html.parser import HTMLParser

import pytest
from markupsafe import escape

from fitune.report import plan_words
from fitune.report.run_page import write_report
from fitune.values.plan import Batch, Epochs, Full, PlainLoss, Recompute, Sgd, Steps
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
    text = Page(write_report(run_directory)).text
    for expected in (
        "Predicted 412.0 MiB, measured 405.0 MiB (+1.7 %)",
        "Peak of tensors 412.0 MiB 405.0 MiB +1.7 %",
        "Throughput 2,133 tokens/s 2,156 tokens/s -1.1 %",
        "from 4.098 in the first step to 1.242 in the last; at best 1.330",
        "4 min 3 s 120 of 120 steps",
        "786 K 7.0 % of parameters",
        "Forward compute 610 ms",
        "LoRA r16, recompute 8 of 8, micro-batch 4 × 2 190.0 MiB 2.31 s yes",
        "10 B × 2,048 tokens × 4,096 words = 80.0 MiB of logits",
        "Read 2,000 163,402",
        "Kept 1,986 160,730",
        "gradient_checkpointing: 4 of 8 blocks",
        "pip install fitune==0.1.0",
        "transformers 5.23.0",
        "lora_r: 16",
        "The capital of Ardenia is Velm.",
    ):
        assert expected in text


@pytest.mark.usefixtures("no_pictures")
def test_without_matplotlib_the_page_says_how_to_get_the_pictures(run_directory):
    page = Page(write_report(run_directory))
    assert "No pictures in the report: pip install 'fitune[plots]'" in page.text
    assert "svg" not in page.tags


@pytest.mark.usefixtures("no_pictures")
def test_nothing_a_user_wrote_becomes_markup(run_directory, plan, run_report, change_report):
    bad = '<script>alert("x")</script><img src=x onerror=y>$title'
    model = dataclasses.replace(plan.model, name=bad)
    (run_directory / "plan.json").write_text(to_json(dataclasses.replace(plan, model=model, model_path=bad)))
    (run_directory / "recipe.yaml").write_text(f"# {bad}\n")
    estimate = json.loads((run_directory / "estimate.json").read_text())
    estimate["decisions"] = [bad]
    estimate["rejected"] = [{"what": bad, "why": bad}]
    estimate["runners_up"][0]["summary"] = bad
    (run_directory / "estimate.json").write_text(json.dumps(estimate))
    ledger = dataclasses.replace(run_report.train_data, dropped={bad: 14}, formats=(bad,))
    sample = Sample(prompt=bad, expected=bad, before=bad, after=bad)
    change_report(
        status="failed",
        reason=bad,
        samples=(sample,),
        train_data=ledger,
        exported=bad,
        versions={"fitune": bad, bad: bad},
    )
    page = Page(write_report(run_directory))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.source.count(str(escape(bad))) >= 15
    assert bad not in page.source


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "missing", [["report.json"], ["report.json", "estimate.json", "metrics.jsonl", "recipe.yaml"]]
)
def test_a_run_that_is_still_going_has_a_page(run_directory, missing):
    for name in missing:
        (run_directory / name).unlink()
    text = Page(write_report(run_directory)).text
    assert "unfinished" in text
    assert "There is no report.json" in text
    if len(missing) == 1:
        assert "Predicted 412.0 MiB, measured 405.0 MiB (+1.7 %)" in text
        assert "120 of 120 steps" in text
    else:
        assert "Memory was neither predicted nor measured." in text
        assert "No step was recorded." in text


def test_a_plan_alone_has_a_page_with_pictures_left_out(run_directory):
    pytest.importorskip("matplotlib")
    for name in ("report.json", "estimate.json", "metrics.jsonl", "recipe.yaml"):
        (run_directory / name).unlink()
    assert "svg" not in Page(write_report(run_directory)).tags


@pytest.mark.usefixtures("no_pictures")
def test_a_failed_run_says_why_and_shows_the_loss_as_it_was(change_report):
    directory = change_report(
        status="failed",
        reason="step 47: the loss is not finite",
        final_loss=float("nan"),
        steps=47,
        memory=None,
    )
    text = Page(write_report(directory)).text
    assert "step 47: the loss is not finite" in text
    assert "4.10 → nan" in text
    assert "47 of 120 steps" in text


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


def test_the_plan_in_words_has_its_numbers(plan):
    text = " ".join(plan_words.sentences(plan, total=90))
    assert "4 × 512 × 2 = 4,096 tokens" in text
    assert "The first 4 of 8 blocks keep only their input" in text
    assert (
        "(num_epochs: 3) the learning rate rises to 2.0e-03 over 5 steps and falls to 0 by a cosine." in text
    )
    assert plan_words.headline(plan) == "LoRA r16 on 7 linears · fp32 · AdamW · 1 × cpu"


def test_the_other_choices_have_words_too(plan):
    schedule = dataclasses.replace(
        plan.schedule, kind="constant", warmup=Steps(count=7), duration=Steps(count=1500), max_grad_norm=0.0
    )
    other = dataclasses.replace(
        plan, tuning=Full(), optimizer=Sgd(momentum=0.9), loss=PlainLoss(), recompute=Recompute(blocks=8),
        batch=Batch(micro_batch_size=1, accumulation=4, seq_len=64, packing=False), schedule=schedule,
        hardware=dataclasses.replace(plan.hardware, gpus_per_node=8, nodes=2),
    )  # fmt: skip
    text = " ".join(plan_words.sentences(other, total=1500))
    assert "Tuning: full." in text
    assert "All 8 blocks keep" in text
    assert "Optimizer: momentum SGD; weight decay" in text
    assert "1 × 64 × 4 × 16 = 4,096 tokens" in text
    assert "Over 1,500 steps the learning rate rises to 2.0e-03 over 7 steps and stays there." in text
    assert "Gradients are not clipped." in text
    longer = " ".join(plan_words.sentences(other, total=1))
    assert "Over 1 step the learning rate rises to 2.0e-03 over 1 step and stays there." in longer
    assert "learning rate" not in " ".join(plan_words.sentences(other, total=None))
    assert plan_words.headline(other).endswith("2 nodes of 8 × cpu")


def test_every_setting_of_the_plan_is_listed(plan):
    settings = dict(plan_words.settings(plan))
    assert settings["tuning.kind"] == "Lora"
    assert settings["tuning.rank"] == "16"
    assert settings["schedule.kind"] == "cosine"
    assert settings["schedule.duration.kind"] == Epochs.__name__
    assert settings["hardware.gpu.memory_bytes"] == "16.00 GiB"
    assert settings["data.sources.0.path"] == "runs/demo/train.jsonl"
    assert settings["batch.packing"] == "yes"
    names = {field.name for field in dataclasses.fields(plan.run)}
    assert {f"run.{name}" for name in names} - set(settings) == {"run.tracking"}
    assert "run.tracking.project" in settings
