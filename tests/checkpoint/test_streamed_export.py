"""Exports whose weights come one by one are those of the whole model, and hold one tensor at a time."""

import json
import weakref
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoint.tiny_export import into, tiny_base, with_adapter
from fitune.checkpoint import layout
from fitune.checkpoint.export import export_adapter, export_full, export_merged
from fitune.checkpoint.layout import FileTensor, write_model
from fitune.errors import CheckpointError
from fitune.models.readers import empty_model, read_config
from runs import same_weights


def on_meta(folder):
    with torch.device("meta"):
        return empty_model(read_config(str(folder)))


def of(base, weights):
    return {"weights": weights, "base_path": str(base)}


class Counted(Mapping[str, Tensor]):
    """Weights of which each is made when it is asked for; knows the most bytes of them that were alive at once."""

    def __init__(self, weights):
        self.weights, self.alive, self.most_bytes, self.asked = weights, 0, 0, list[str]()

    def __getitem__(self, name):
        self.asked.append(name)
        made = self.weights[name].clone()
        self.alive += made.nbytes
        self.most_bytes = max(self.most_bytes, self.alive)
        weakref.finalize(made, self._gone, made.nbytes)
        return made

    def _gone(self, size):
        self.alive -= size

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


def texts_of(folder):
    return {file.name: file.read_text() for file in folder.iterdir() if file.suffix != ".safetensors"}


@pytest.mark.parametrize(("tied", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_full_model_is_the_one_that_is_written_whole(tmp_path, tied, dtype):
    model = tiny_base(tmp_path / "base", tied=tied)
    export_full(model, into(tmp_path / "whole"), dtype=dtype)
    weights = Counted(dict(model.named_parameters()))
    words = {**of(tmp_path / "base", weights), "dtype": dtype}
    export_full(on_meta(tmp_path / "base"), into(tmp_path / "streamed", secure=True), **words)
    assert weights.asked == list(weights)
    assert same_weights(tmp_path / "streamed", tmp_path / "whole")
    assert texts_of(tmp_path / "streamed") == texts_of(tmp_path / "whole")


def test_one_tensor_is_held_at_a_time_whatever_the_model_takes(tmp_path):
    model = tiny_base(tmp_path / "base")
    weights = Counted(dict(model.named_parameters()))
    words = of(tmp_path / "base", weights)
    export_full(on_meta(tmp_path / "base"), into(tmp_path / "out"), dtype=torch.float32, **words)
    sizes = sorted((weight.nbytes for weight in weights.weights.values()), reverse=True)
    assert weights.most_bytes <= sizes[0] + sizes[1]
    assert weights.most_bytes < sum(sizes) / 2


def test_a_large_model_is_written_as_shards_with_an_index(tmp_path, monkeypatch):
    model = tiny_base(tmp_path / "base")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    pieces = {n: FileTensor(torch.empty_like(w, device="meta"), lambda w=w: w) for n, w in weights.items()}
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(layout, "SHARD_BYTES", 20_000)
    write_model(on_meta(tmp_path / "base"), tmp_path / "out", pieces)
    model.save_pretrained(tmp_path / "whole", max_shard_size=20_000)
    assert same_weights(tmp_path / "out", tmp_path / "whole")
    ours, theirs = (json.loads((tmp_path / each / layout.INDEX).read_text()) for each in ("out", "whole"))
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"] == theirs["metadata"]
    for name, file in ours["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    reloaded = type(model).from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, weights[name]) for name, p in reloaded.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_and_merged_model_are_those_that_are_written_whole(tmp_path, dtype):
    model = with_adapter(tiny_base(tmp_path / "base"))
    base = str(tmp_path / "base")
    export_adapter(model, into(tmp_path / "adapter"), base=base)
    export_merged(model, into(tmp_path / "merged"), dtype=dtype, base_path=base)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    with torch.device("meta"):
        structure = with_adapter(on_meta(tmp_path / "base"))
    words = of(tmp_path / "base", weights)
    export_adapter(structure, into(tmp_path / "adapter2", secure=True), base=base, **words)
    export_merged(structure, into(tmp_path / "merged2"), dtype=dtype, **words)
    for kind in ("adapter", "merged"):
        assert same_weights(tmp_path / kind, tmp_path / f"{kind}2")
        assert texts_of(tmp_path / kind) == texts_of(tmp_path / f"{kind}2")


def test_files_that_are_not_what_was_written_are_refused(tmp_path, monkeypatch):
    weights = dict(tiny_base(tmp_path / "base").named_parameters())
    write = layout.write_synced

    def rotten(path, chunks):
        write(path, chunks)
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(layout, "write_synced", rotten)
    with pytest.raises(CheckpointError, match="not what was written"):
        export_full(on_meta(tmp_path / "base"), into(tmp_path / "out"), **of(tmp_path / "base", weights))
    assert not (tmp_path / "out").exists()
