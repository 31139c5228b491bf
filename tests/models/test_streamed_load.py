"""A model is read to where it belongs: never more in memory than the finished one and a block, packed or not."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers.quantizers import AutoHfQuantizer

from faults.budgets import Budget
from fitune.errors import ModelError
from fitune.models.language_model import blocks_of
from fitune.models.low_bit.packing import PackOnArrival, quantise_blocks
from fitune.models.weights import load_model
from fitune.values.plan import Dense, Hqq, Nf4
from models.tiny_models import load, tiny_model

pytest.importorskip("bitsandbytes")
pytest.importorskip("hqq.core.quantize")

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 500}


def saved(folder, family="llama", **changes):
    tiny_model(family, **changes).save_pretrained(folder, max_shard_size="1MB")
    return folder


def packed_later(folder, dtype, base):
    model = load_model(str(folder), dtype=dtype, device=CPU)
    quantise_blocks(blocks_of(model), base)
    return model


ON_ARRIVAL = [
    *((family, torch.bfloat16, Nf4()) for family in ("llama", "qwen3", "qwen2", "gpt2", "qwen3_moe")),
    ("llama", torch.float32, Nf4()),
    *((family, torch.bfloat16, Hqq(bits=3, group_size=16)) for family in ("gpt2", "qwen3_moe")),
]


@pytest.mark.parametrize(("family", "dtype", "base"), ON_ARRIVAL)
def test_packed_on_arrival_is_packed_later(tmp_path, family, dtype, base):
    """Tied, sharded, biased, transposed and mixed models alike; nothing of the loader stays behind."""
    folder = saved(tmp_path / "model", family)
    found, expected = (
        load_model(str(folder), dtype=dtype, device=CPU, base=base),
        packed_later(folder, dtype, base),
    )
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.view(-1).view(torch.uint8).equal(theirs[name].view(-1).view(torch.uint8)), name
    assert not hasattr(found, "hf_quantizer")
    assert "quantization_config" not in found.config.to_dict()
    assert all(m.training == found.training for m in found.modules())


def single(folder):
    tiny_model("llama", **SIZES).save_pretrained(folder, max_shard_size="1GB")
    return folder


def sharded(folder):
    return saved(folder, **SIZES)


def tied(folder):
    return saved(folder, "qwen3", **SIZES)


def in_the_cache(folder):
    """As the Hub's client lays it out: links with the files' names to blobs with the names of their contents."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "1f0c"
    snapshot.mkdir(parents=True)
    sharded(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1f0c")
    return snapshot


@pytest.mark.thinned(3)
@pytest.mark.parametrize("layout", [single, sharded, tied, in_the_cache])
@pytest.mark.parametrize(
    ("dtype", "base"),
    [
        (torch.float32, Dense()), (torch.bfloat16, Dense()), (torch.bfloat16, Nf4()), (torch.float32, Nf4()),
        (torch.bfloat16, Hqq(bits=4)),
    ],
    ids=["dense", "cast", "nf4", "nf4-fp32", "hqq"],
)  # fmt: skip
def test_never_more_than_the_finished_model_and_one_block(
    tmp_path,
    monkeypatch,
    layout,
    dtype,
    base,
):
    """Every tensor counted, those of the files too. Read by this thread alone: no other is seen by a dispatch mode."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    folder = layout(tmp_path / "model")
    read = []
    tracker = Budget()
    with tracker:
        model = load_model(
            str(folder),
            dtype=dtype,
            device=CPU,
            base=base,
            on_bytes=lambda done, total: read.append((done, total)),
        )
    storages = {t.untyped_storage()._cdata: t.nbytes for t in (*model.parameters(), *model.buffers())}
    final = sum(storages.values())
    dense = tiny_model(**SIZES)
    block = sum(p.nbytes for p in blocks_of(dense)[0].parameters())
    peak = max(tracker.peaks.values())
    assert final <= peak <= 1.05 * final + block
    if base != Dense():
        assert peak < sum(p.nbytes for p in dense.parameters()) / 2
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert [done for done, _ in read] == sorted(done for done, _ in read)
    assert read[-1][0] == read[-1][1] <= files
    assert len(read) > 10, "told tensor by tensor"


def test_a_model_in_the_hubs_cache_is_named_by_its_id(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = in_the_cache(tmp_path / "models--some--model")
    found = load("some/model")
    assert found.config.name_or_path == "some/model"
    there = load(snapshot)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), there.parameters(), strict=True))
    (snapshot / "model-00002-of-00009.safetensors").unlink(missing_ok=True)
    next(iter(sorted(snapshot.glob("*.safetensors")))).unlink()
    with pytest.raises(ModelError, match=r"safetensors: not there"):
        load("some/model")


def test_no_dense_model_is_taken_from_a_gpu_in_advance():
    """transformers warms the allocator up with all bytes that it expects; those of packed weights are never dense."""
    model = tiny_model()
    packer = AutoHfQuantizer.from_config(PackOnArrival(Nf4()), pre_quantized=False)
    packer.preprocess_model(model)
    expected = sum(
        p.numel() * packer.param_element_size(model, name, p) for name, p in model.named_parameters()
    )
    outside = [p for name, p in model.named_parameters() if "proj" not in name]
    assert expected == sum(p.nbytes for p in outside)
