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
    seen = json.loads(printed.stdout)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "seed"), [(6, 7)], ids=["some"])
def test_killed_at_random_moments_with_damage_between_a_run_ends_as_if_undisturbed(
    tmp_path, model_folder, data_file, kills, seed
):
    seen = kill(tmp_path / "runs", model_folder, data_file, "--kills", kills, "--seed", seed)
    assert seen["killed"] == kills
    assert seen["ended like the undisturbed run"] >= 1


@pytest.mark.weekly
@pytest.mark.parametrize("kills", [10, 30])
def test_killed_anywhere_in_its_ending_a_run_gets_its_export_its_report_and_its_page(
    tmp_path, model_folder, data_file, kills
):
    seen = kill(tmp_path / "runs", model_folder, data_file, "--kills", kills, "--steps", 3, "--only-ending")
    assert seen["killed"] == kills


@pytest.mark.parametrize("missing", ["report.html", "adapter"])
def test_a_complete_run_gets_what_its_ending_owes(train, tmp_path, missing):
    """Killed after report.json and before the page, it once was "already complete" without one for ever."""
    run = tmp_path / "run"
    assert train(save_steps=2)[0] == 0
    file = run / missing
    before = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    train(save_steps=2).ends(0, "already complete")
    assert file.exists()
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize("damage", ["{\n}\n", ""], ids=["unreadable", "empty"])
def test_a_complete_run_whose_metrics_were_damaged_gets_its_page_from_its_checkpoint(train, tmp_path, damage):
    run = tmp_path / "run"
    assert train(save_steps=2)[0] == 0
    metrics = run / "metrics.jsonl"
    before = metrics.read_bytes()
    metrics.write_text(damage)
    (run / "report.html").unlink()
    train(save_steps=2).ends(0, "are put back from its checkpoint")
    assert metrics.read_bytes() == before
    assert (run / "report.html").is_file()


def test_an_older_checkpoint_does_not_take_the_last_steps_from_the_metrics(train, tmp_path):
    run = tmp_path / "run"
    assert train(save_steps=1)[0] == 0
    before = (run / "metrics.jsonl").read_bytes()
    (run / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"")
    (run / "report.html").unlink()
    assert train(save_steps=1)[0] == 0
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_export_that_nothing_holds_any_more_is_named(train, tmp_path):
    assert train()[0] == 0
    shutil.rmtree(tmp_path / "run" / "adapter")
    train().ends(0, "neither adapter nor a checkpoint holds the weights")


def test_a_page_of_an_earlier_end_does_not_stay(train, tmp_path, monkeypatch):
    """A run made longer and stopped before its new page: the old one spoke of the old end."""
    page = tmp_path / "run" / "report.html"
    assert train(save_steps=2)[0] == 0
    assert page.is_file()

    def stop(*_words, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("fitune.train.run"), "prepare", stop)
    assert train("--resume", save_steps=2, max_steps=4)[0] == 130
    assert not page.exists()
