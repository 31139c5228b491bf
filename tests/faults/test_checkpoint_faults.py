"""Rows 1, 4 and 5 of the fault table: a save that dies, files that rot, a disk that is full."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from checkpoint.killed_saves import same, save, save_as_ranks, shares_of, state_of
from checkpoint.saves import names
from fitune.checkpoint.commit import read_commit, verify
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.errors import CheckpointError


@pytest.fixture
def two_saved(tmp_path):
    """A run with step-1 and step-2."""
    for step in (1, 2):
        save(tmp_path, state_of(step), keep=2, eval_loss=None)
    return tmp_path


# Row 1: kill -9 at every stage of a save


CHANGES = ("mkdir", "open", "write", "rename", "replace", "symlink", "unlink", "rmdir")


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_before_any_of_its_system_calls_a_save_is_whole_or_absent(tmp_path, monkeypatch, ranks):
    """What the disk has before a call is what kill -9 leaves there: each is copied, then read and saved into."""
    start, run, calls = tmp_path / "start", tmp_path / "run", []
    for step in (1, 2):
        save(start, state_of(step), keep=2, eval_loss=float(step))
    shutil.copytree(start, run, symlinks=True)  # no file of it is known to this process

    def copy(call):
        folder = tmp_path / f"killed-{len(calls)}"
        calls.append("copying")
        shutil.copytree(run, folder, symlinks=True)
        calls[-1] = call

    def noted(name, real):
        def call(*words, **named):
            if calls[-1:] != ["copying"]:
                copy(f"{name} {words[0]}")
            return real(*words, **named)

        return call

    with monkeypatch.context() as patched:
        for name in CHANGES:
            patched.setattr(os, name, noted(name, getattr(os, name)))
        if ranks == 1:
            save(run, state_of(3), keep=1, eval_loss=0.5)
        else:
            save_as_ranks(run, shares_of(state_of(3), ranks), keep=1, eval_loss=0.5)
    copy("none")
    commit = next(i for i, call in enumerate(calls) if call.startswith("rename") and "/.tmp-step-3-" in call)
    for number, call in enumerate(calls):
        left = tmp_path / f"killed-{number}"
        found, step = newest_checkpoint(left), 2 if number <= commit else 3
        assert (found.path.name, found.warnings) == (f"step-{step}", ()), call
        assert same(load_checkpoint(found.path), state_of(step)), call
        save(left, state_of(4), keep=1, eval_loss=0.1)
        assert names(left) == ["LINE", "best", "latest", "step-4"], call
    stages = [
        "mkdir", "model.safetensors", "write", "state.json", "rename", "symlink", "pruned-step-1", "rmdir",
    ]  # fmt: skip
    if ranks == 2:
        stages += ["model-rank0.safetensors", "optimizer-rank1.safetensors", "slices.json"]
    assert all(any(stage in call for call in calls) for stage in stages)


# Row 4: truncated, one byte flipped, missing, zero-size


def truncate(file):
    os.truncate(file, file.stat().st_size - 2)  # the last byte of COMMIT is only the newline


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def empty(file):
    os.truncate(file, 0)


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json", "COMMIT"]
)
@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink, empty])
def test_a_damaged_file_is_named_and_an_older_checkpoint_taken(two_saved, damage, file):
    damage(two_saved / "checkpoints/step-2" / file)
    found = newest_checkpoint(two_saved)
    assert found.path.name == "step-1"
    if (damage, file) == (Path.unlink, "COMMIT"):  # a save that is killed leaves no such folder
        assert found.damaged == (two_saved / "checkpoints/step-2",)
        said = "step-2: no COMMIT, so this is no whole checkpoint"
    else:
        (warning,) = found.warnings
        said = f"step-2/{file}: "
        assert said in warning
    assert same(load_checkpoint(found.path), state_of(1))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(two_saved / "checkpoints/step-2")


def test_damage_everywhere_leaves_no_checkpoint_and_two_warnings(two_saved):
    for step in (1, 2):
        empty(two_saved / f"checkpoints/step-{step}/model.safetensors")
    found = newest_checkpoint(two_saved)
    assert (found.path, len(found.warnings)) == (None, 2)


def changed_bytes(file):
    """The content of ``file`` with every third of its bytes changed in turn, some left out, and longer."""
    content = file.read_bytes()
    for place in range(0, len(content), 3):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    for place in range(0, len(content), 10):
        yield content[:place] + content[place + 1 :]
    yield content + b"\n"
    yield content[:-1] + b"\r\n"


@pytest.mark.parametrize(("name", "check"), [("COMMIT", read_commit), ("state.json", verify)])
def test_a_change_of_any_byte_is_seen(two_saved, name, check):
    path = two_saved / "checkpoints/step-2"
    for content in list(changed_bytes(path / name)):
        (path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"step-2/{name}: "):
            check(path)


def test_two_checkpoints_that_changed_places_are_both_refused(two_saved):
    folder = two_saved / "checkpoints"
    for old, new in (("step-1", "x"), ("step-2", "step-1"), ("x", "step-2")):
        (folder / old).rename(folder / new)
    found = newest_checkpoint(two_saved)
    assert found.path is None
    assert ["holds step 1, not" in found.warnings[0], "holds step 2, not" in found.warnings[1]] == [True] * 2


def test_a_commit_cannot_point_outside_its_folder(two_saved):
    path = two_saved / "checkpoints/step-2"
    text = (path / "COMMIT").read_text()
    (path / "COMMIT").write_text(text.replace('"model.safetensors"', '"../step-1/model.safetensors"'))
    found = newest_checkpoint(two_saved)
    assert (found.path.name, "no file inside" in found.warnings[0]) == ("step-1", True)


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
        save(two_saved, state_of(3), keep=1, eval_loss=None)
    assert names(two_saved) == ["LINE", "latest", "step-1", "step-2"]


def full_disk_after(writes, monkeypatch):
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
        save(two_saved, state_of(3), keep=1, eval_loss=None)
    assert names(two_saved) == ["LINE", "latest", "step-1", "step-2"]
    monkeypatch.undo()
    assert same(load_checkpoint(newest_checkpoint(two_saved).path), state_of(2))
    full_disk_after(13, monkeypatch)  # with one write more it is saved: these are all the places there are
    assert save(two_saved, state_of(3), keep=1, eval_loss=None).name == "step-3"


@pytest.mark.parametrize("writes", [0, 5, 12])
def test_a_step_that_could_not_be_replaced_is_still_the_old_one(two_saved, monkeypatch, writes):
    full_disk_after(writes, monkeypatch)
    with pytest.raises(CheckpointError, match="No space left"):
        save(two_saved, state_of(2), keep=1, eval_loss=4.0)
    monkeypatch.undo()
    assert names(two_saved) == ["LINE", "latest", "step-1", "step-2"]
    assert same(load_checkpoint(newest_checkpoint(two_saved).path), state_of(2))
