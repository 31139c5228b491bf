"""A checkpoint gives back what was put in, says what it holds, and keeps to its number."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.killed_saves import same, save, state_of
from checkpoint.saves import names
from fitune.checkpoint.commit import read_commit
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.checkpoint.save import share_bytes
from fitune.checkpoint.slices import share_of
from fitune.checkpoint.state import TrainState, tensor_chunks, tensors_bytes
from fitune.errors import CheckpointError
from fitune.units import format_bytes

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    saved = save(tmp_path, state_of(7), keep=1, eval_loss=None)
    assert saved == tmp_path / "checkpoints" / "step-7"
    said = []
    assert same(load_checkpoint(saved, on_note=said.append), state_of(7))
    assert newest_checkpoint(tmp_path, said.append).path == saved
    size = sum(stored.bytes for stored in read_commit(saved).files.values())
    assert said == 2 * [f"verifying {saved}: {format_bytes(size)}"]


def test_every_dtype_and_shape_is_read_by_the_safetensors_library(tmp_path):
    tensors = {f"t{i}": (torch.arange(6).reshape(2, 3) % 2).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3.5), "slice": torch.arange(12.0).reshape(3, 4).T[1:]}
    file = tmp_path / "all.safetensors"
    file.write_bytes(b"".join(tensor_chunks(tensors)))
    read = load_file(file)
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())
    assert file.stat().st_size == tensors_bytes(tensors)


def test_commit_holds_size_and_sha256_of_every_other_file(tmp_path):
    path = save(tmp_path, state_of(1), keep=1, eval_loss=2.5)
    commit = json.loads((path / "COMMIT").read_text())
    files = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "COMMIT"}
    assert {n: (s["sha256"], s["bytes"]) for n, s in commit["files"].items()} == {
        name: (hashlib.sha256(content).hexdigest(), len(content)) for name, content in files.items()
    }
    assert (commit["step"], commit["eval_loss"]) == (1, 2.5)
    assert all(name.endswith((".safetensors", ".json", ".jsonl")) for name in files)


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, float("nan"))):
        save(tmp_path, state_of(step), keep=2, eval_loss=loss)
    assert names(tmp_path) == ["LINE", "best", "latest", "step-20", "step-40", "step-50"]
    links = {name: os.readlink(tmp_path / "checkpoints" / name) for name in ("latest", "best")}
    assert links == {"latest": "step-50", "best": "step-20"}


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, state_of(step), keep=3, eval_loss=None)
    assert newest_checkpoint(tmp_path).path.name == "step-100"


def test_links_are_relative_so_that_a_run_may_be_moved(tmp_path):
    save(tmp_path / "here", state_of(3), keep=1, eval_loss=1.0)
    (tmp_path / "here").rename(tmp_path / "there")
    assert same(load_checkpoint(tmp_path / "there" / "checkpoints" / "best"), state_of(3))


def test_the_same_step_again_moves_the_first_aside(tmp_path):
    first = state_of(5)
    save(tmp_path, first, keep=2, eval_loss=9.0)
    other = TrainState(step=5, tensors={"model": {"w": torch.zeros(1)}}, facts={"again": True})
    path = save(tmp_path, other, keep=2, eval_loss=1.0)
    assert same(load_checkpoint(path), other)
    assert names(tmp_path) == ["LINE", "abandoned-step-5", "best", "latest", "step-5"]
    assert same(load_checkpoint(tmp_path / "checkpoints" / "abandoned-step-5"), first)


def test_no_checkpoint_is_no_error(tmp_path):
    assert newest_checkpoint(tmp_path) == newest_checkpoint(tmp_path / "nowhere")
    assert newest_checkpoint(tmp_path).path is None


def test_an_empty_tensor_is_refused_by_name(tmp_path):
    state = TrainState(step=1, tensors={"model": {"layers.0.w": torch.zeros(0, 4)}}, facts={})
    with pytest.raises(CheckpointError, match=r"'layers.0.w' is empty, shape \(0, 4\)"):
        save(tmp_path, state, keep=1, eval_loss=None)
    assert not (tmp_path / "checkpoints").exists()


def test_the_bytes_asked_for_are_enough(tmp_path):
    path = save(tmp_path, state_of(1), keep=1, eval_loss=None)
    assert sum(file.stat().st_size for file in path.iterdir()) <= share_bytes(share_of(state_of(1), rank=0))


def test_only_temporary_folders_of_dead_processes_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    for owner in (os.getppid(), 2**22 + 1):  # alive; above the largest pid Linux gives
        (folder / f".tmp-step-1-{owner}-{'0' * 16}").mkdir(parents=True)
    save(tmp_path, state_of(2), keep=1, eval_loss=None)
    assert names(tmp_path) == [f".tmp-step-1-{os.getppid()}-{'0' * 16}", "LINE", "latest", "step-2"]
