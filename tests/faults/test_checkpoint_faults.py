"""Rows 1, 4 and 5 of the fault table: a save that dies, files that rot, a disk that is full."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from checkpoint import killed_saves
from checkpoint.killed_saves import same, state_of
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.checkpoint.save import save_checkpoint
from fitune.errors import CheckpointError


@pytest.fixture
def two_saved(tmp_path):
    """A run with step-1 and step-2."""
    for step in (1, 2):
        save_checkpoint(tmp_path, state_of(step), keep=2, eval_loss=None)
    return tmp_path


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# Row 1: kill -9 at every stage of a save


def test_killed_before_any_of_its_system_calls_a_save_is_whole_or_absent(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, killed_saves.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert printed.returncode == 0, printed.stderr
    attempts = json.loads(printed.stdout)
    calls = [attempt["call"] for attempt in attempts]
    commit = next(i for i, call in enumerate(calls) if call.startswith("replace") and "/.tmp-COMMIT-" in call)
    assert all(attempt["intact"] and attempt["tidy"] and not attempt["warnings"] for attempt in attempts)
    assert [attempt["found"] for attempt in attempts] == [2] * (commit + 1) + [3] * (
        len(attempts) - commit - 1
    )
    stages = (
        "mkdir",
        "model.safetensors",
        "write",
        "state.json",
        "rename",
        "symlink",
        "pruned-step-1",
        "rmdir",
    )
    assert all(any(stage in call for call in calls) for stage in stages)


def test_a_folder_without_commit_is_ignored_and_refused_by_path(two_saved):
    (two_saved / "checkpoints/step-2/COMMIT").unlink()
    assert newest_checkpoint(two_saved).path.name == "step-1"
    assert newest_checkpoint(two_saved).warnings == ()
    with pytest.raises(CheckpointError, match="step-2: no COMMIT, so this checkpoint was never finished"):
        load_checkpoint(two_saved / "checkpoints/step-2")


# Row 4: truncated, one byte flipped, missing, zero-size


def truncate(file: Path):
    os.truncate(file, file.stat().st_size - 1)


def flip_a_byte(file: Path):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def empty(file: Path):
    os.truncate(file, 0)


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink, empty])
def test_a_damaged_file_is_named_and_an_older_checkpoint_taken(two_saved, damage, file):
    damage(two_saved / "checkpoints/step-2" / file)
    found = newest_checkpoint(two_saved)
    assert found.path.name == "step-1"
    assert len(found.warnings) == 1
    assert f"step-2/{file}" in found.warnings[0]
    assert same(load_checkpoint(found.path), state_of(1))
    with pytest.raises(CheckpointError, match=f"step-2/{file}: "):
        load_checkpoint(two_saved / "checkpoints/step-2")


@pytest.mark.parametrize("damage", [truncate, empty])
def test_a_damaged_commit_is_named_too(two_saved, damage):
    damage(two_saved / "checkpoints/step-2/COMMIT")
    if damage is truncate:
        truncate(two_saved / "checkpoints/step-2/COMMIT")  # the first byte was only the newline
    found = newest_checkpoint(two_saved)
    assert (found.path.name, "step-2/COMMIT: damaged" in found.warnings[0]) == ("step-1", True)


def test_damage_everywhere_leaves_no_checkpoint_and_two_warnings(two_saved):
    for step in (1, 2):
        empty(two_saved / f"checkpoints/step-{step}/model.safetensors")
    found = newest_checkpoint(two_saved)
    assert (found.path, len(found.warnings)) == (None, 2)


def test_a_commit_cannot_point_outside_its_folder(two_saved):
    commit = two_saved / "checkpoints/step-2/COMMIT"
    commit.write_text(commit.read_text().replace("model.safetensors", "../step-1/model.safetensors"))
    found = newest_checkpoint(two_saved)
    assert (found.path.name, "leaves" in found.warnings[0]) == ("step-1", True)


def test_a_path_that_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="step-9: no such checkpoint"):
        load_checkpoint(tmp_path / "checkpoints/step-9")


# Row 5: disk full


def test_too_little_space_is_refused_before_anything_is_written(two_saved, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 1000))
    with pytest.raises(
        CheckpointError, match=r"checkpoint step-3 needs 1.0 MiB, 1000 B free in .*, .* short"
    ):
        save_checkpoint(two_saved, state_of(3), keep=1, eval_loss=None)
    assert names(two_saved) == ["latest", "step-1", "step-2"]


def full_disk_after(writes: int, monkeypatch):
    left, write = [writes], os.write

    def full(handle, content):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, content)

    monkeypatch.setattr(os, "write", full)


@pytest.mark.parametrize("writes", range(13))
def test_a_disk_that_fills_up_while_saving_keeps_what_was_there(two_saved, monkeypatch, writes):
    full_disk_after(writes, monkeypatch)
    with pytest.raises(
        CheckpointError, match="No space left on device; it needs 1.0 MiB. The last saved one is step-2"
    ):
        save_checkpoint(two_saved, state_of(3), keep=1, eval_loss=None)
    assert names(two_saved) == ["latest", "step-1", "step-2"]
    monkeypatch.undo()
    assert same(load_checkpoint(newest_checkpoint(two_saved).path), state_of(2))


@pytest.mark.parametrize("writes", [0, 5, 12])
def test_a_step_that_could_not_be_replaced_is_still_the_old_one(two_saved, monkeypatch, writes):
    full_disk_after(writes, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(two_saved, state_of(2), keep=1, eval_loss=4.0)
    monkeypatch.undo()
    assert names(two_saved) == ["latest", "step-1", "step-2"]
    assert same(load_checkpoint(newest_checkpoint(two_saved).path), state_of(2))


def test_one_write_more_and_the_save_succeeds(two_saved, monkeypatch):
    """Says that the thirteen places above are all there are."""
    full_disk_after(13, monkeypatch)
    assert save_checkpoint(two_saved, state_of(3), keep=1, eval_loss=None).name == "step-3"
