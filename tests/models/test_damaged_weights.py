"""Weight files that are not what they should be: one readable error naming file and tensor, dense or packed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fitune.errors import ModelError, OutOfMemory, is_out_of_memory
from fitune.models.weight_files import stored_tensors
from fitune.values.plan import Dense, Hqq, Nf4
from models.tiny_models import load, tiny_model

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """One of several files."""
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(
        tmp_path / "model", max_shard_size="100KB"
    )
    return tmp_path / "model"


def shard(folder):
    """The file that NAME is in."""
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][NAME]


def rewritten(change):
    def damage(folder):
        file = shard(folder)
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def indexed(name):
    def damage(folder):
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"][NAME] = name
        index.write_text(json.dumps(content))

    return damage


def cut(keep):
    def damage(folder):
        shard(folder).write_bytes(keep(shard(folder).read_bytes()))

    return damage


DAMAGED = r"model-0000\d.*cut short or no safetensors file: "
CASES = {
    "data cut short": (cut(lambda c: c[:-10]), DAMAGED),
    "no safetensors": (cut(lambda c: b"<html>not found</html>" * 9), DAMAGED),
    "a missing shard": (lambda folder: shard(folder).unlink(), rf"model-0000\d.*not there.*says that {NAME}|model\.l"),
    "a missing tensor": (rewritten(lambda t: t.pop(NAME)), rf"model-0000\d.*{NAME} is not in it"),
    "a misshapen tensor": (
        rewritten(lambda t: t.update({NAME: torch.ones(5, 64)})),
        rf"of another shape: {NAME} \(5, 64\) in model-0000\d.*config\.json says \(128, 64\)",
    ),
    "an extra tensor": (
        rewritten(lambda t: t.update(extra=torch.ones(5))), r"unknown to the model: extra in model-0000\d",
    ),
    "integers": (
        rewritten(lambda t: t.update({NAME: t[NAME].to(torch.int8)})), rf"model-0000\d.*{NAME} holds I8",
    ),
    "an index to nowhere": (indexed("model-9.safetensors"), rf"model-9\.safetensors: not there.*{NAME}"),
    "a path out": (indexed("../model.safetensors"), rf"{NAME} is listed in '\.\./model.safetensors'"),
    "an absolute path": (indexed("/etc/passwd"), r"is listed in '/etc/passwd'"),
    "a pickle": (indexed("model.bin"), r"is listed in 'model\.bin', which is not a safetensors"),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"), r"index\.json: no index of weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("base", [Dense(), Nf4()], ids=["dense", "packed"])
@pytest.mark.parametrize(("damage", "message"), CASES.values(), ids=CASES.keys())
def test_damage_is_named(folder, damage, message, base):
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder, base=base)
    assert len(str(caught.value).splitlines()) == 2, "what is wrong, and what to do"


@pytest.mark.parametrize("base", [Dense(), Nf4()], ids=["dense", "packed"])
def test_two_tables_that_differ_are_not_one(folder, base):
    """transformers warns and unties them; the plan counts one, and the export's config would say so."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(
        ModelError, match="separate embeddings, but config.json says tie_word_embeddings"
    ) as caught:
        load(folder, base=base)
    assert "tie_word_embeddings: false" in str(caught.value.hint)


@pytest.mark.parametrize("base", [Nf4(), Hqq(bits=4)], ids=["nf4", "hqq"])
def test_no_memory_while_packing_is_not_taken_for_damaged_files(folder, monkeypatch, base):
    """transformers collects what packing raises and raises an error of its own."""

    def full(*words, **named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("fitune.models.low_bit.packing.packed_linear", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        load(folder, base=base)
    assert is_out_of_memory(caught.value)
    assert not isinstance(caught.value, OutOfMemory | ModelError)


def test_a_file_without_a_tensor_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: holds no tensor"):
        stored_tensors(tmp_path)
