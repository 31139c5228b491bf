"""An export that fails loses nothing: what was trained is on the disk before, and `fitune export` does it again."""

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fitune
from conftest import settings_of
from fitune.checkpoint import export
from fitune.errors import CheckpointError
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.reports import STOPPED_IN_EXPORT
from fitune.values.serial import to_json
from runs import contents, report_of, same_weights, steps_of, written_plan

MERGED = {"export": "merged"}
WRITING = "fitune.checkpoint.layout.ExportFolder.write_texts"
NO_ROOM = OSError(28, "No space left on device")
NO_MEMORY = RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried")


def raising(error):
    def fail(*_words, **_named):
        raise error

    return fail


@pytest.fixture(scope="module")
def whole(model_folder, data_file, tmp_path_factory):
    """The same run, undisturbed: an adapter and the merged model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    fitune.train(**settings_of(model_folder, data_file, folder, **MERGED))
    return folder


@pytest.fixture(scope="module")
def full(model_folder, data_file, tmp_path_factory):
    """And one of all weights."""
    folder = tmp_path_factory.mktemp("undisturbed") / "full"
    fitune.train(**settings_of(model_folder, data_file, folder, tuning="full", export="full"))
    return folder


def same_adapter(run, other):
    return same_weights(*(it / "adapter" / "adapter_model.safetensors" for it in (run, other)))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckpointError("the exported files do not hold it"), 1, "do not hold it"),
        pytest.param(NO_MEMORY, 3, "out of memory", marks=pytest.mark.slow),
    ],
    ids=["refused", "memory"],
)
def test_a_merge_that_fails_leaves_the_adapter_and_can_be_done_again(
    train, call, whole, tmp_path, monkeypatch, error, code, said
):
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(export, "merged", raising(error))
        train(**MERGED).ends(
            code, said, f"trained; its adapter weights are saved in {run / 'adapter'}",
            f"`fitune export {run}` tries it again",
        )  # fmt: skip
    report = report_of(run)
    assert (report.status, report.steps, Path(report.exported)) == ("failed", 2, run / "adapter")
    assert report.failure.doing == "exporting"
    assert (run / "report.html").is_file()
    assert not (run / "merged").exists()
    assert same_adapter(run, whole)

    for words in ((), ("--resume",)):
        train(*words, **MERGED).ends(2, "is trained; only its export failed", f"fitune export {run}")
    call("export", run).ends(0)
    assert same_weights(run / "merged", whole / "merged")
    assert report_of(run).status == "complete"
    train(**MERGED).ends(0, "already complete")


class Killed(BaseException):
    """As a kill -9, nothing is done after it."""


def test_killed_while_merging_it_is_exported_without_training_again(
    train, call, whole, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(export, "merged", raising(Killed))
        with pytest.raises(Killed):
            train(**MERGED)
    assert report_of(run).reason == STOPPED_IN_EXPORT
    train("--resume", **MERGED).ends(2, "is trained; only its export failed", f"fitune export {run}")
    call("export", run).ends(0, f"read from {run / 'adapter'}")
    assert same_weights(run / "merged", whole / "merged")
    report = report_of(run)
    assert (report.status, report.steps, Path(report.exported).name) == ("complete", 2, "merged")


def test_killed_before_any_weights_are_written_it_trains_again(train, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(WRITING, raising(Killed))
        with pytest.raises(Killed):
            train(save_steps=0)
    assert report_of(run).reason == STOPPED_IN_EXPORT
    train("--resume", save_steps=0).ends(0)
    assert same_adapter(run, whole)


@pytest.mark.parametrize(
    ("tuning", "held_in", "save_steps"),
    [("lora", "checkpoints/step-2", 2), ("lora", "checkpoints/step-2", 0), ("full", "model-unverified", 0)],
    ids=["saved", "none saved", "unverified"],
)
def test_an_adapter_or_a_model_that_fails_can_be_exported_again(
    train, call, request, tmp_path, monkeypatch, tuning, held_in, save_steps
):
    """What was trained is in its last checkpoint, which is made where nothing else holds it, or in the export that was
    not verified."""
    run, is_lora = tmp_path / "run", tuning == "lora"
    words = {"tuning": tuning, "export": "adapter" if is_lora else "full", "save_steps": save_steps}
    with monkeypatch.context() as broken:
        if is_lora:
            broken.setattr(WRITING, raising(NO_ROOM))
        else:
            broken.setattr(
                "fitune.checkpoint.export.verify_export", raising(CheckpointError("logits differ"))
            )
        train(**words).ends(1, str(run / held_in), f"`fitune export {run}` tries it again")
    assert not (run / "adapter").exists()
    assert not (run / "model").exists()
    assert (run / held_in).exists()
    told = call("export", run).ends(0)
    assert (f"verifying {run / held_in}: " in told) == is_lora
    if is_lora:
        assert same_adapter(run, request.getfixturevalue("whole"))
    else:
        assert same_weights(run / "model", request.getfixturevalue("full") / "model")
        assert not (run / held_in).exists()
    assert report_of(run).status == "complete"


def test_an_export_is_not_promised_where_no_checkpoint_can_be_saved_either(train, monkeypatch):
    monkeypatch.setattr(WRITING, raising(NO_ROOM))
    monkeypatch.setattr(import_module("fitune.train.saving"), "write_share", raising(NO_ROOM))
    ended = train(save_steps=0)
    assert "tries it again" not in ended.ends(1, "nothing holds what was trained")
    assert "what was trained could not be saved as a checkpoint" in ended.out


def test_a_run_of_a_gpu_is_exported_on_a_machine_without_one(call, saved, tmp_path):
    plan = replace(written_plan(saved), hardware=hardware_for(gpu=find_gpu("h100")), attention="flash")
    (saved / "plan.json").write_text(to_json(plan))
    call("export", saved, "--as", "merged", "--out", tmp_path / "out").ends(0)
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_an_adapter_of_an_earlier_end_is_not_taken_for_the_last(train, call, saved, monkeypatch):
    """A run made longer whose second export failed: RUN/adapter is of step 2 then, the checkpoint of step 4."""
    adapter = saved / "adapter" / "adapter_model.safetensors"
    old = load_file(adapter)
    with monkeypatch.context() as broken:
        broken.setattr(WRITING, raising(NO_ROOM))
        train("--resume", save_steps=1, max_steps=4).ends(1)
    os.utime(adapter, (1, 1))
    call("export", saved, "--as", "merged").ends(0, "step-4")
    call("export", saved).ends(0)
    new = load_file(adapter)
    assert any(not torch.equal(old[name], new[name]) for name in old)


def test_a_run_killed_before_its_last_step_is_told_as_one_and_not_exported(call, saved):
    metrics = saved / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    (saved / "report.json").unlink()
    call("report", saved).ends(0, "nobody runs it")
    call("export", saved).ends(2, "1 of 2 steps are done")


@pytest.mark.parametrize(
    ("run", "words", "said"),
    [
        ("shop", ("--as", "full"), "trained an adapter"),
        ("shop", ("--as", "adapter"), "has its adapter already"),
        ("full", (), "no adapter to merge"),
        ("full", ("--as", "merged"), "no adapter to merge"),
        ("full", ("--as", "full"), "has its model already"),
    ],
)
def test_what_a_run_does_not_have_is_not_exported(call, request, run, words, said):
    folder = request.getfixturevalue(run)
    before = contents(folder)
    call("export", folder, *words).ends(2, said)
    assert contents(folder) == before


# What a merge does to the loss


@pytest.mark.parametrize("held_out", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_merged_packed_model_is_measured_beside_the_trained_one(train, call, tmp_path, held_out):
    pytest.importorskip("bitsandbytes")
    words = {"tuning": "qlora", "learning_rate": 5e-2, "max_steps": 4, "val_fraction": 0.3 if held_out else 0}
    run = tmp_path / "run"
    out = train(**words, **MERGED).ends(0)
    loss = report_of(run).merged_loss
    assert loss.held_out is held_out
    assert loss.trained != loss.merged
    if held_out:
        assert loss.trained == pytest.approx(steps_of(run)[-1].eval_loss, rel=1e-6)
    else:
        assert "training rows (none are held out)" in out
    page = (run / "report.html").read_text().replace("&#39;", "'")
    for text in (out, (run / "merged" / "README.md").read_text(), page):
        assert all(line in text for line in loss.lines())
    call("export", run, "--out", tmp_path / "copy").ends(0, loss.lines()[0])


def test_a_loss_that_cannot_be_measured_costs_no_merge(train, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("fitune.train.evaluate"), "evaluate", raising(NO_MEMORY))
    train(**MERGED).ends(0, "loss was not measured: [enforce]")
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()
