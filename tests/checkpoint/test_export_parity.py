"""Row 38 of the fault table: what is exported is what was trained, read back without fitune."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint.tiny_export import (
    CARD,
    TEMPLATE,
    answer,
    assert_peft_answers,
    byte_tokenizer,
    into,
    tiny_base,
    with_adapter,
    with_random_b,
)
from fitune.checkpoint import export, layout, parity
from fitune.checkpoint.export import export_adapter, export_full, export_merged
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.models.adapter_file import linear_names
from fitune.models.attention import use_attention
from models.tiny_models import tiny_model


def files(folder):
    return {path.name for path in folder.iterdir()}


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model, before):
    after = model.state_dict()
    return before.keys() == after.keys() and all(torch.equal(after[name], t) for name, t in before.items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_full_model_comes_back_bit_for_bit(tmp_path, tied):
    model = tiny_base(tmp_path / "base", tied=tied)
    torch.nn.init.normal_(
        model.get_input_embeddings().weight
    )  # trained: no longer what the base folder holds
    assert export_full(model, into(tmp_path / "out")) == (0.0, ())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(answer(reloaded), answer(model))
    head, embeddings = reloaded.get_output_embeddings().weight, reloaded.get_input_embeddings().weight
    assert (head.data_ptr() == embeddings.data_ptr()) is tied
    assert ("lm_head.weight" in load_file(tmp_path / "out/model.safetensors")) is not tied


def test_a_full_model_has_the_files_the_hub_expects(tmp_path):
    export_full(tiny_base(tmp_path / "base"), into(tmp_path / "out"))
    assert files(tmp_path / "out") == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.chat_template, tokenizer("hi!").input_ids) == (
        TEMPLATE,
        byte_tokenizer()("hi!").input_ids,
    )
    assert (tmp_path / "out/README.md").read_text() == CARD


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_comes_back_bit_for_bit_on_its_base(tmp_path, tied):
    model = with_adapter(tiny_base(tmp_path / "base", tied=tied))
    where = {"base": "org/tiny", "base_path": str(tmp_path / "base")}
    assert export_adapter(model, into(tmp_path / "out"), **where) == (0.0, ())
    assert_peft_answers(model, tmp_path / "base", tmp_path / "out")


def test_an_adapter_has_the_files_peft_expects_and_names_the_given_base(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base"))
    export_adapter(model, into(tmp_path / "out"), base="org/tiny", base_path=str(tmp_path / "base"))
    assert files(tmp_path / "out") == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "README.md",
    }  # fmt: skip
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["task_type"]) == (
        "org/tiny",
        4,
        "CAUSAL_LM",
    )
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    weights = load_file(tmp_path / "out/adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 3  # A and B × blocks × targets
    assert all(tensor.numel() > 0 for tensor in weights.values())


def test_a_16_bit_adapter_on_a_16_bit_base_keeps_its_bits(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base", dtype=torch.bfloat16))
    difference, _ = export_adapter(model, into(tmp_path / "out"), base=str(tmp_path / "base"))
    weights = load_file(tmp_path / "out/adapter_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert difference == 0.0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_answers_like_the_adapted_one(tmp_path, tied, dtype):
    model = with_adapter(tiny_base(tmp_path / "base", tied=tied, dtype=dtype))
    before, expected = snapshot(model), answer(model)
    _, warnings = export_merged(model, into(tmp_path / "out"))
    assert unchanged(model, before)
    assert torch.equal(answer(model), expected)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert reloaded.dtype == dtype
    largest = (answer(reloaded) - expected).float().abs().max().item()
    assert 0 < largest <= parity.TOLERANCE[dtype] * expected.abs().max()
    assert warnings == ()
    with model.disable_adapter():
        assert (answer(model) - expected).abs().max() > 10 * largest


@pytest.mark.parametrize("family", ["gpt2", "falcon", "gemma2", "phi3", "mixtral", "qwen3_moe"])
def test_other_families_merge_too(tmp_path, family):
    """Transposed, fused, tied and softcapped matrices; experts that lie on disk otherwise than in memory."""
    tiny_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    targets = [name for name in linear_names(base) if ".mlp.experts" not in name and "head" not in name]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    with_random_b(model)
    adapter = {"base": str(tmp_path / "base")}
    difference, _ = export_adapter(model, into(tmp_path / "adapter"), **adapter)
    assert difference == 0.0
    difference, _ = export_merged(model, into(tmp_path / "merged"))
    assert difference < 1e-4
    on_disk = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("base", "merged")]
    assert on_disk[0] == on_disk[1]


def test_adapters_on_fused_experts_are_merged(tmp_path):
    """Those of PEFT's all-linear: attention, the router's matrix and the stacks of experts."""
    model = get_peft_model(
        tiny_model("mixtral"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=generator)
    export_merged(model, into(tmp_path / "out"))
    ids = torch.arange(3, 20)[None]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids).logits
    torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_a_merged_weight_is_base_plus_scaled_product_by_hand(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base"))
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    export_merged(model, into(tmp_path / "out"))
    merged = load_file(tmp_path / "out/model.safetensors")
    by_hand = layer.base_layer.weight + (8 / 4) * (b @ a)
    torch.testing.assert_close(
        merged["model.layers.1.mlp.down_proj.weight"], by_hand.detach(), rtol=0, atol=1e-6
    )
    assert merged.keys() == load_file(tmp_path / "base/model.safetensors").keys()


def test_a_merge_that_rounds_the_training_away_is_said_to(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base", dtype=torch.bfloat16), zero=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 1e-4)
    _, warnings = export_merged(model, into(tmp_path / "out"))
    assert "much of what was learned is lost" in warnings[0]


def test_a_merge_of_an_untrained_adapter_is_said_to_change_nothing(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base"), zero=True)
    difference, warnings = export_merged(model, into(tmp_path / "out"))
    assert difference == 0.0
    assert "changes nothing" in warnings[0]


def test_the_training_attention_is_neither_exported_nor_lost(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base"))
    use_attention(model.get_base_model(), "sdpa")
    before = model.get_base_model().config._attn_implementation
    model.train()
    export_merged(model, into(tmp_path / "out"))
    assert (model.get_base_model().config._attn_implementation, model.training) == (before, True)
    assert "attn_implementation" not in (tmp_path / "out/config.json").read_text()


# What verification is for


def test_an_adapter_on_the_wrong_base_is_found(tmp_path):
    model = with_adapter(tiny_base(tmp_path / "base"))
    other = tiny_base(tmp_path / "other")
    torch.nn.init.normal_(other.get_input_embeddings().weight)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="does not answer like the trained one: logits differ by"):
        export_adapter(model, into(tmp_path / "out"), base=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_empty_tensors_are_found(tmp_path):
    model = tiny_base(tmp_path / "base")
    pieces = {name: layout.FileTensor(t, lambda t=t: t) for name, t in {"hollow": torch.zeros(0, 4)}.items()}
    with pytest.raises(CheckpointError, match="hollow"):
        layout.write_model(model, tmp_path, pieces)


def test_a_tensor_that_transformers_does_not_load_is_found(tmp_path, monkeypatch):
    model = tiny_base(tmp_path / "base")
    load = export.whole_model

    def forgetful(*words, **named):
        reloaded = load(*words, **named)
        reloaded.get_parameter("model.norm.weight").data.add_(1e-3)
        return reloaded

    monkeypatch.setattr(export, "whole_model", forgetful)
    with pytest.raises(CheckpointError, match=r"do not hold the trained weights: 1 tensors.*model\.norm"):
        export_full(model, into(tmp_path / "out"))


def test_a_dense_base_goes_to_the_host_where_only_the_packed_one_fits_twice(monkeypatch):
    """Four bits of a weight became sixteen on a device that had room for a second packed model."""
    packed = SimpleNamespace(device=torch.device("cuda"), nbytes=1000)
    model = SimpleNamespace(parameters=lambda: iter([packed]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2000, 4000))
    assert parity.reload_device(model) == torch.device("cuda")
    assert parity.reload_device(model, needed_bytes=4000) == torch.device("cpu")


def test_not_finite_weights_are_not_exported(tmp_path):
    model = tiny_base(tmp_path / "base")
    model.get_parameter("model.norm.weight").data[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*NaN or infinite"):
        export_full(model, into(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_with_content_is_only_replaced_on_request(tmp_path):
    model, out = tiny_base(tmp_path / "base"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    with pytest.raises(RunDirectoryError, match="already exists and is not empty"):
        export_full(model, into(out))
    assert files(out) == {"thesis.tex"}
    export_full(model, into(out, replace=True))
    assert "thesis.tex" not in files(out)
    assert files(tmp_path) == {"base", "out"}


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    model = tiny_base(tmp_path / "base")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"export out needs 32\.\d MiB, 1000 B free"):
        export_full(model, into(tmp_path / "out"))
    assert files(tmp_path) == {"base"}


_DEAD = f"{2**22 + 1}-{'0' * 16}"
"""A process id above the largest that Linux gives."""


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    for left in (f".tmp-out-{_DEAD}", f".tmp-outer-{_DEAD}"):
        (tmp_path / left).mkdir()
    export_full(tiny_base(tmp_path / "base"), into(tmp_path / "out"))
    assert files(tmp_path) == {"base", "out", f".tmp-outer-{_DEAD}"}
