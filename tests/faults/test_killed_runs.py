"""Row 1 of the fault table for whole runs: kill -9 at random moments, with damage in between, and in the ending."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from checkpoint import killed_runs


def kill(folder, model, data, *words):
    folder.mkdir()
    printed = subprocess.run(
        [sys.executable, killed_runs.__file__, *map(str, (folder, model, data, *words))],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=3600,
    )
    assert printed.returncode == 0, printed.stderr
    return json.loads(printed.stdout)


@pytest.mark.slow
def test_killed_at_random_moments_with_damage_between_a_run_ends_as_if_undisturbed(
    tmp_path, model_folder, data_file
):
    seen = kill(tmp_path / "runs", model_folder, data_file, "--kills", 6, "--seed", 7)
    assert seen["killed"] == 6
    assert seen["ended like the undisturbed run"] >= 1


@pytest.mark.weekly
def test_killed_anywhere_in_its_ending_a_run_gets_its_export_its_report_and_its_page(
    tmp_path, model_folder, data_file
):
    seen = kill(tmp_path / "runs", model_folder, data_file, "--kills", 30, "--steps", 3, "--only-ending")
    assert seen["killed"] == 30


@pytest.mark.parametrize("missing", ["report.html", "adapter"])
def test_a_complete_run_gets_what_its_ending_owes(train, saved, missing):
    """Killed after report.json and before the page, it once was "already complete" without one for ever."""
    file, adapter = saved / missing, saved / "adapter" / "adapter_model.safetensors"
    before = adapter.read_bytes()
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    train(save_steps=1).ends(0, "already complete")
    assert file.exists()
    assert adapter.read_bytes() == before


@pytest.mark.parametrize("damage", ["{\n}\n", ""], ids=["unreadable", "empty"])
def test_a_complete_run_whose_metrics_were_damaged_gets_its_page_from_its_checkpoint(train, saved, damage):
    metrics = saved / "metrics.jsonl"
    before = metrics.read_bytes()
    metrics.write_text(damage)
    (saved / "report.html").unlink()
    train(save_steps=1).ends(0, "are put back from its checkpoint")
    assert metrics.read_bytes() == before
    assert (saved / "report.html").is_file()


def test_an_older_checkpoint_does_not_take_the_last_steps_from_the_metrics(train, saved):
    before = (saved / "metrics.jsonl").read_bytes()
    (saved / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"")
    (saved / "report.html").unlink()
    train(save_steps=1).ends(0)
    assert (saved / "metrics.jsonl").read_bytes() == before


def test_an_export_that_nothing_holds_any_more_is_named(train, saved):
    for folder in ("adapter", "checkpoints"):
        shutil.rmtree(saved / folder)
    train(save_steps=1).ends(0, "neither adapter nor a checkpoint holds the weights")


def test_a_page_of_an_earlier_end_does_not_stay(train, saved, monkeypatch):
    """A run made longer and stopped before its new page: the old one spoke of the old end."""

    def stop(*_words, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("fitune.train.run"), "prepare", stop)
    assert (saved / "report.html").is_file()
    train("--resume", save_steps=1, max_steps=4).ends(130)
    assert not (saved / "report.html").exists()
