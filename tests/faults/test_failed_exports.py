"""An export that fails loses nothing: what was trained is on the disk before, and `fitune export` does it again."""

import json
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
from runs import report_of, same_weights, written_plan

MERGED = {"export": "merged"}
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


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckpointError("the exported files do not hold it"), 1, "do not hold it"),
        pytest.param(NO_ROOM, 1, "No space left on device", marks=pytest.mark.slow),
        pytest.param(NO_MEMORY, 3, "out of memory", marks=pytest.mark.slow),
        pytest.param(KeyError("lost"), 1, "KeyError", marks=pytest.mark.slow),
    ],
    ids=["refused", "disk", "memory", "bug"],
)
def test_a_merge_that_fails_leaves_the_adapter_and_can_be_done_again(
    train, call, whole, tmp_path, monkeypatch,
    error, code, said,
) :  # fmt: skip
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(export, "merged", raising(error))
        found, _, err = train(**MERGED)
    assert found == code
    assert said in err
    assert f"trained; its adapter weights are saved in {run / 'adapter'}" in err
    assert f"`fitune export {run}` tries it again" in err
    report = report_of(run)
    assert (report.status, report.steps, Path(report.exported)) == ("failed", 2, run / "adapter")
    assert report.failure is not None
    assert report.failure.doing == "exporting"
    assert (run / "report.html").is_file()
    assert not (run / "merged").exists()
    assert same_weights(*(it / "adapter" / "adapter_model.safetensors" for it in (run, whole)))

    for words in ((), ("--resume",)):
        train(*words, **MERGED).ends(2, "is trained; only its export failed", f"fitune export {run}")
    assert call("export", run)[0] == 0
    assert same_weights(*(it / "merged" / "model.safetensors" for it in (run, whole)))
    assert report_of(run).status == "complete"
    assert "already complete" in train(**MERGED)[1]


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
        broken.setattr("fitune.checkpoint.layout.ExportFolder.write_texts", raising(Killed))
        with pytest.raises(Killed):
            train(save_steps=0)
    assert report_of(run).reason == STOPPED_IN_EXPORT
    train("--resume", save_steps=0).ends(0)
    assert same_weights(*(it / "adapter" / "adapter_model.safetensors" for it in (run, whole)))


@pytest.mark.parametrize(
    ("tuning", "kind", "how"),
    [
        ("lora", "adapter", "checkpoint"),
        ("full", "full", "unverified"),
        pytest.param("lora", "adapter", "unverified", marks=pytest.mark.slow),
        pytest.param("full", "full", "checkpoint", marks=pytest.mark.slow),
    ],
)
def test_an_adapter_or_a_model_that_fails_can_be_exported_again(
    train, call, whole, tmp_path, monkeypatch, tuning, kind, how
):
    folder = {"adapter": "adapter", "full": "model"}[kind]
    words = {"tuning": tuning, "export": kind, "save_steps": 2 if how == "checkpoint" else 0}
    if tuning == "full":
        whole = tmp_path / "whole"
        assert train(output_dir=whole, **words)[0] == 0
    place = (
        "fitune.checkpoint.export.verify_export"
        if how == "unverified"
        else "fitune.checkpoint.layout.ExportFolder.write_texts"
    )
    error = CheckpointError("logits differ") if how == "unverified" else NO_ROOM
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(place, raising(error))
        code, _, err = train(**words)
    assert code == 1
    assert not (run / folder).exists()
    assert (run / f"{folder}-unverified").exists() is (how == "unverified")
    assert ("what was trained is kept in" in err) is (how == "unverified")
    out = call("export", run).ends(0)
    assert ("step-2" in out) is (how == "checkpoint")
    file = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
    assert same_weights(run / folder / file, whole / folder / file)
    assert not (run / f"{folder}-unverified").exists()
    assert report_of(run).status == "complete"


@pytest.mark.parametrize("tuning", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_without_checkpoints_saves_one_when_nothing_else_holds_its_weights(
    train, call, whole, tmp_path, monkeypatch, tuning
):
    folder, file = (
        ("adapter", "adapter_model.safetensors") if tuning == "lora" else ("model", "model.safetensors")
    )
    words = {"tuning": tuning, "export": "adapter" if tuning == "lora" else "full", "save_steps": 0}
    if tuning == "full":
        whole = tmp_path / "whole"
        assert train(output_dir=whole, **words)[0] == 0
    run = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr("fitune.checkpoint.layout.ExportFolder.write_texts", raising(NO_ROOM))
        code, _, err = train(**words)
    assert code == 1
    assert f"weights are saved in {run / 'checkpoints' / 'step-2'}, but exporting failed" in err
    assert f"`fitune export {run}` tries it again" in err
    assert call("export", run)[0] == 0
    assert same_weights(run / folder / file, whole / folder / file)


def test_an_export_is_not_promised_where_no_checkpoint_can_be_saved_either(train, monkeypatch):
    monkeypatch.setattr("fitune.checkpoint.layout.ExportFolder.write_texts", raising(NO_ROOM))
    monkeypatch.setattr(import_module("fitune.train.saving"), "write_share", raising(NO_ROOM))
    code, out, err = train(save_steps=0)
    assert code == 1
    assert "what was trained could not be saved as a checkpoint" in out
    assert "tries it again" not in err
    assert "nothing holds what was trained" in err


@pytest.mark.parametrize("export", ["merged", pytest.param("full", marks=pytest.mark.slow)])
def test_a_run_of_a_gpu_is_exported_on_a_machine_without_one(train, call, tmp_path, export):
    tuning = "lora" if export == "merged" else "full"
    run = tmp_path / "run"
    assert train(tuning=tuning, export="adapter" if tuning == "lora" else "full", save_steps=2)[0] == 0
    plan = written_plan(run)
    (run / "plan.json").write_text(
        to_json(replace(plan, hardware=hardware_for(gpu=find_gpu("h100")), attention="flash"))
    )
    call("export", run, "--as", export, "--out", tmp_path / "out").ends(0)
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_an_adapter_of_an_earlier_end_is_not_taken_for_the_last(train, call, tmp_path, monkeypatch):
    """A run made longer whose second export failed: RUN/adapter is of step 2 then, the checkpoint of step 4."""
    assert train(save_steps=2)[0] == 0
    old = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    with monkeypatch.context() as broken:
        broken.setattr("fitune.checkpoint.layout.ExportFolder.write_texts", raising(NO_ROOM))
        assert train("--resume", save_steps=2, max_steps=4)[0] == 1
    os.utime(tmp_path / "run/adapter/adapter_model.safetensors", (1, 1))
    call("export", tmp_path / "run", "--as", "merged").ends(0, "step-4")
    assert call("export", tmp_path / "run")[0] == 0
    new = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert any(not torch.equal(old[name], new[name]) for name in old)


def test_nothing_is_exported_before_the_last_step(train, call, tmp_path):
    assert train(save_steps=1)[0] == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    (tmp_path / "run" / "report.json").unlink()
    call("export", tmp_path / "run").ends(2, "1 of 2 steps are done")


def test_what_a_run_does_not_have_is_not_exported(train, call, shop, tmp_path):
    call("export", shop, "--as", "full").ends(2, "trained an adapter")
    call("export", shop, "--as", "adapter").ends(2, "has its adapter already")
    assert train(tuning="full", export="full")[0] == 0
    for words in ((), ("--as", "merged")):
        call("export", tmp_path / "run", *words).ends(2, "no adapter to merge")
    call("export", tmp_path / "run", "--as", "full").ends(2, "has its model already")


# What a merge does to the loss


@pytest.mark.parametrize("held_out", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_merged_packed_model_is_measured_beside_the_trained_one(train, call, tmp_path, held_out):
    pytest.importorskip("bitsandbytes")
    words = {"tuning": "qlora", "learning_rate": 5e-2, "max_steps": 4, "val_fraction": 0.3 if held_out else 0}
    run = tmp_path / "run"
    out = train(**words, **MERGED).ends(0)
    report = report_of(run)
    loss = report.merged_loss
    assert loss is not None
    assert loss.held_out is held_out
    assert loss.trained != loss.merged
    if held_out:
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert loss.trained == pytest.approx(last["eval_loss"], rel=1e-6)
    else:
        assert "training rows (none are held out)" in out
    for line in loss.lines():
        assert line in out
        assert line in (run / "merged" / "README.md").read_text()
        assert line in (run / "report.html").read_text().replace("&#39;", "'")
    call("export", run, "--out", tmp_path / "copy").ends(0, loss.lines()[0])


def test_a_loss_that_cannot_be_measured_costs_no_merge(train, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("fitune.train.evaluate"), "evaluate", raising(NO_MEMORY))
    train(**MERGED).ends(0, "loss was not measured: [enforce]")
    assert (tmp_path / "run" / "merged" / "model.safetensors").is_file()
