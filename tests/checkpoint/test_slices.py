"""What several ranks save is read back whole, or by the rows that one rank needs; what is missing is found."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.killed_saves import same, save, save_as_ranks, shares_of, state_of
from fitune.checkpoint.resume import load_checkpoint
from fitune.checkpoint.slices import SavedTensors, joined, read_index
from fitune.checkpoint.state import TrainState
from fitune.errors import CheckpointError
from fitune.values.counts import rows_of_share

WEIGHTS = {
    "even": torch.randn(8, 3),
    "odd": torch.randn(7, 2, 5).bfloat16(),
    "vector": torch.randn(5),
    "fewer rows than ranks": torch.randn(2, 6),
    "scalar": torch.tensor(3.5),
}


def state():
    rng = {"cpu": torch.get_rng_state()}
    return TrainState(step=7, tensors={"model": WEIGHTS, "optimizer": {}, "rng": rng}, facts={"a": 1})


def saved_model(folder, world):
    """Of one process it is whole."""
    shares = shares_of(state(), world)
    words = {"keep": 1, "eval_loss": None}
    path = save(folder, state(), **words) if world == 1 else save_as_ranks(folder, shares, **words)
    return load_checkpoint(path).tensors["model"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_ranks_save_comes_back_whole_bit_for_bit(tmp_path, world):
    assert same(
        load_checkpoint(save_as_ranks(tmp_path, shares_of(state(), world), keep=1, eval_loss=None)), state()
    )


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("later", [1, 2, 3, 5])
def test_any_number_of_ranks_reads_its_rows_and_columns(tmp_path, world, later):
    model = saved_model(tmp_path, world)
    assert isinstance(model, SavedTensors)
    for name, tensor in WEIGHTS.items():
        assert model.shape(name) == tensor.shape
        for dim in range(tensor.ndim):
            for rank in range(later):
                start, stop = rows_of_share(tensor.shape[dim], later, rank)
                found = model.part(name, dim, start, stop)
                assert found.dtype == tensor.dtype
                assert torch.equal(found, tensor.narrow(dim, start, stop - start))


def test_shares_are_those_of_torch():
    for rows in range(9):
        for world in (1, 2, 3, 4, 7):
            ends = [rows_of_share(rows, world, rank) for rank in range(world)]
            chunks = torch.arange(rows).chunk(world) if rows else ()
            assert [stop - start for start, stop in ends if stop > start] == [len(part) for part in chunks]


def test_each_rank_writes_its_rows_and_nothing_else(tmp_path):
    path = save_as_ranks(tmp_path, shares_of(state(), 4), keep=1, eval_loss=None)
    parts = [load_file(path / f"model-rank{rank}.safetensors") for rank in range(4)]
    assert [len(part["even"]) for part in parts] == [2, 2, 2, 2]
    assert ["fewer rows than ranks" in part for part in parts] == [True, True, False, False]
    assert load_file(path / "model.safetensors").keys() == {"scalar"}
    assert load_file(path / "optimizer.safetensors") == {}


def test_only_the_files_with_the_wanted_rows_are_read(tmp_path):
    path = save_as_ranks(tmp_path, shares_of(state(), 4), keep=1, eval_loss=None)
    model = load_checkpoint(path).tensors["model"]
    for rank in (1, 2, 3):
        (path / f"model-rank{rank}.safetensors").unlink()
    assert isinstance(model, SavedTensors)
    assert "even" in model
    assert "uneven" not in model
    assert torch.equal(model.part("even", 0, 0, 2), WEIGHTS["even"][:2])
    with pytest.raises(CheckpointError, match=r"model-rank1\.safetensors: cannot be read"):
        model.part("even", 0, 1, 3)


def test_the_checkpoint_of_one_process_has_no_index(tmp_path):
    path = save(tmp_path, state(), keep=1, eval_loss=None)
    files = sorted(file.name for file in path.iterdir())
    assert files == [
        "COMMIT", "metrics.jsonl", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json",
    ]  # fmt: skip


def test_a_part_that_no_rank_wrote_is_found_before_the_commit(tmp_path):
    shares = shares_of(state(), 2)
    shares[1] = replace(shares[1], slices={}, files={})
    with pytest.raises(CheckpointError, match=r"'even': its parts \[\(0, 4\)\] do not make up 0 to 8"):
        save_as_ranks(tmp_path, shares, keep=1, eval_loss=None)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_file_that_rank_0_does_not_see_is_found_before_the_commit(tmp_path, monkeypatch):
    """Two machines may each have a folder of that name."""
    from fitune.checkpoint import save as saving

    write = saving.write_hashed

    def elsewhere(path, chunks):
        if "rank1" in path.name:
            (tmp_path / "other").mkdir(exist_ok=True)
            return write(tmp_path / "other" / path.name, chunks)
        return write(path, chunks)

    monkeypatch.setattr(saving, "write_hashed", elsewhere)
    with pytest.raises(CheckpointError, match=r"model-rank1\.safetensors: a rank wrote") as caught:
        save_as_ranks(tmp_path, shares_of(state(), 2), keep=1, eval_loss=None)
    assert "file system that all machines share" in (caught.value.hint or "")
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 3}, r"dimension 3 of a shape \(8, 3\)"),
        ({"parts": [[0, 0, 4], [1, 5, 8]]}, "do not make up 0 to 8"),
        ({"parts": [[0, 0, 4], [1, 4, 9]]}, "do not make up 0 to 8"),
        ({"parts": [[0, 0]]}, "parts"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(change, words):
    right = {"shape": [8, 3], "dtype": "F32", "dim": 0, "parts": [[0, 0, 4], [1, 4, 8]]}
    content = {"groups": {"model": {"even": {**right, **change}}}}
    with pytest.raises(ValueError, match=words):
        read_index(json.dumps(content).encode())


def test_the_index_is_the_same_whichever_rank_is_heard_first():
    slices = [share.slices for share in shares_of(state_of(3), 2)]
    assert joined(slices) == joined(slices[::-1])
