"""What tests do with a run: train a plan, stop it, go on, and read what it wrote into its directory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fitune.track.metrics import read_metrics
from fitune.train.current import Callbacks
from fitune.train.run import run
from fitune.values.plan import Plan
from fitune.values.reports import RunReport
from fitune.values.serial import from_json


def callbacks(*, stop_after=None, **others):
    """Nobody who listens; when it asks for the ``stop_after``-th time, after each step and before each
    batch of an evaluation that follows one, the run is asked to stop."""
    asked = [0]

    def stop_asked():
        asked[0] += 1
        return stop_after is not None and asked[0] >= stop_after

    quiet = {
        "on_data": lambda data, loader, done: None, "on_note": lambda note: None, "stop_asked": stop_asked,
        "answer": lambda model, conversations: ["" for _ in conversations],
    }  # fmt: skip
    return Callbacks(**quiet | others)


def trained(plan, *, stop_after=None, on_note=print, **words):
    """The report of a run of ``plan``."""
    return run(plan, callbacks=callbacks(stop_after=stop_after, on_note=on_note), **words)


def stopped_and_resumed(straight, broken, *, stop_after=3):
    """The report of a run; one that is stopped and goes on has its losses and its export, bit for bit."""
    one = trained(straight)
    assert trained(broken, stop_after=stop_after).status == "interrupted"
    two = trained(broken, resume=True)
    assert two.status == "complete"
    assert losses(straight) == losses(broken)
    assert same_weights(one.exported, two.exported)
    return one


def folder_of(run):
    return Path(run.run.output_dir) if isinstance(run, Plan) else run


def steps_of(run):
    """The steps of a plan's run, or of the run in a folder."""
    return read_metrics(folder_of(run) / "metrics.jsonl")


def losses(run):
    return [step.loss for step in steps_of(run)]


def assert_close(run, other, *, within=1e-5):
    """The losses of two runs differ by rounding alone."""
    assert losses(run) == pytest.approx(losses(other), abs=within)


def assert_merged(plan):
    """A run that exports merged weights answers as PEFT does with the adapter of the same run on the dense base."""
    folder = plan.run.output_dir
    merged, adapter = (
        trained(replace(plan, run=replace(plan.run, export=kind, output_dir=f"{folder}-{kind}"))).exported
        for kind in ("merged", "adapter")
    )
    ids = torch.arange(3, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32)
    untrained = base(input_ids=ids).logits
    expected = PeftModel.from_pretrained(base, adapter)(input_ids=ids).logits
    found = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(untrained, expected, atol=1e-3)


def report_of(run):
    return from_json(RunReport, (folder_of(run) / "report.json").read_text())


def written_plan(run):
    return from_json(Plan, (folder_of(run) / "plan.json").read_text())


def contents(folder):
    """Every file below a folder, by its path there."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def same_weights(one, other):
    """Whether two files, or the files of two folders, hold the same tensors."""
    ours, theirs = (
        {name: tensor for file in files for name, tensor in load_file(file).items()}
        for files in (
            [place] if place.is_file() else place.glob("*.safetensors") for place in (Path(one), Path(other))
        )
    )
    return (
        bool(ours)
        and ours.keys() == theirs.keys()
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


def set_words(settings):
    """Settings as words of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
