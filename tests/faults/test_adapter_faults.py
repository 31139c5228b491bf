"""Rows 21 to 24 of the fault table: foreign adapters and model folders, looked at before anything is loaded."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint.tiny_export import tiny_base, with_adapter
from faults.adapters import Payload, edit_config, edit_weights
from fitune.checkpoint.export import adapter_weights
from fitune.checkpoint.layout import write_adapter
from fitune.errors import CheckpointError
from fitune.models.adapter_file import check_adapter
from fitune.models.remote_code import refuse_pickle


def write(model, folder):
    folder.mkdir(exist_ok=True)
    write_adapter(model, folder, adapter_weights(model), "org/tiny", in_whole=False)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("org") / "tiny"
    tiny_base(folder)
    return folder


@pytest.fixture(scope="module")
def written(base):
    return write(with_adapter(AutoModelForCausalLM.from_pretrained(base)), base.parent / "adapter")


@pytest.fixture
def adapter(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "adapter"))


def key(weights, part):
    return next(name for name in weights if part in name)


# Row 21


def test_a_matching_adapter_passes_on_a_folder_and_on_a_model(adapter, base):
    assert check_adapter(adapter, base=base) == ()
    assert check_adapter(adapter, base=AutoModelForCausalLM.from_pretrained(base)) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]", "expected an object, found list"),
        ('{"peft_type": "LORA"}', "r is missing"),
        ("{", "not JSON"),
        ("", "adapter_config.json"),
        ("null", "adapter_config.json"),
    ],
    ids=["list", "no rank", "half", "empty", "null"],
)
def test_a_config_that_is_no_adapters(adapter, content, said, base):
    (adapter / "adapter_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=said):
        check_adapter(adapter, base=base)


@pytest.mark.parametrize("rank", [2, 8])
def test_wrong_rank(adapter, rank, base):
    edit_config(adapter, r=rank)
    with pytest.raises(
        CheckpointError, match=rf"12 keys:\n(.|\n)*q_proj.lora_A.weight: \(4, 32\), expected \({rank}, 32\)"
    ):
        check_adapter(adapter, base=base)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 1}, r"layers\.1\.mlp\.down_proj.*: the base has no such linear"),
        ({"num_hidden_layers": 3}, r"layers\.2\.\S*: missing, expected \(4, "),
        ({"model_type": "gpt2", "n_embd": 32}, "the base has no such linear"),
        ({"intermediate_size": 96}, r"expected \(4, 96\)"),
    ],
)
def test_wrong_base(adapter, base, tmp_path, change, reason):
    config = json.loads((base / "config.json").read_text()) | change
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason) as refusal:
        check_adapter(adapter, base=tmp_path / "other")
    assert "'org/tiny'" in refusal.value.hint
    edit_config(adapter, base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        check_adapter(adapter, base=tmp_path / "other")
    assert refusal.value.hint == "take it with the base it was trained on, or export it again"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: {n: t for n, t in w.items() if "1.self_attn.q_proj" not in n}, r"1\.self_attn\.q_proj\S*: missing"),
        (lambda w: {f"transformer.{n}": t for n, t in w.items()}, "the base has no such linear"),
        (lambda w: {**w, "surprise.weight": torch.ones(2)}, r"surprise\.weight: does not begin with"),
        (lambda w: {}, "no lora_A and lora_B at all"),
        (lambda w: {n: t.flatten() for n, t in w.items()}, r"\(128,\), expected \(4, 32\)"),
    ],
)  # fmt: skip
def test_wrong_keys(adapter, base, change, reason):
    edit_weights(adapter, change)
    with pytest.raises(CheckpointError, match=reason):
        check_adapter(adapter, base=base)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(adapter, value, base):
    def spoil(weights):
        weights[key(weights, "v_proj.lora_B")][1, 1] = value
        return weights

    edit_weights(adapter, spoil)
    with pytest.raises(CheckpointError, match=r"1 key:\n.*v_proj\.lora_B\.weight: NaN or infinite"):
        check_adapter(adapter, base=base)


def test_a_zero_delta_is_a_warning(tmp_path, base):
    adapter = write(with_adapter(tiny_base(tmp_path / "base"), zero=True), tmp_path / "adapter")
    assert check_adapter(adapter, base=base) == ("the adapter changes nothing: every B matrix is zero",)


def test_another_base_of_the_same_shapes_is_a_warning(adapter, base):
    edit_config(adapter, base_model_name_or_path="org/other")
    assert "trained on 'org/other'" in check_adapter(adapter, base=base)[0]


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64])
def test_weights_that_are_no_safetensors(adapter, content, base):
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: damaged"):
        check_adapter(adapter, base=base)


# Row 23


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "x.pkl"]
)
def test_pickled_weights_are_refused_and_not_run(tmp_path, adapter, name, base):
    trace = tmp_path / "ran"
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / name).write_bytes(pickle.dumps(Payload(trace)))
    for refuse in (refuse_pickle, lambda folder: check_adapter(folder, base=base)):
        with pytest.raises(CheckpointError, match=rf"pickled \({name}\)"):
            refuse(adapter)
    assert not trace.exists()
    pickle.loads((adapter / name).read_bytes())
    assert trace.exists()  # the payload would have worked


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path, adapter, base):
    (adapter / "training_args.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    assert check_adapter(adapter, base=base) == ()
    assert not (tmp_path / "ran").exists()


def test_no_weights_at_all(adapter, base):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: missing"):
        check_adapter(adapter, base=base)


# Row 24


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModel": "payload.Evil"}},
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "payload"}},
        {"trust_remote_code": True},
    ],
)
def test_an_adapter_that_brings_code_is_refused_and_nothing_imported(adapter, monkeypatch, changes, base):
    monkeypatch.syspath_prepend(str(adapter))
    (adapter / "payload.py").write_text("class Evil: ...")
    edit_config(adapter, **changes)
    with pytest.raises(CheckpointError, match="asks to run code"):
        check_adapter(adapter, base=base)
    assert "payload" not in sys.modules
