"""Embedding and head trained whole beside adapters: PEFT's gradients, PEFT's files, ties kept, nothing held twice."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint.tiny_export import answer, assert_peft_answers, into
from fitune.checkpoint.export import export_adapter, export_merged
from fitune.errors import CheckpointError
from fitune.models.adapter_file import check_adapter
from fitune.models.adapters import add_adapters, load_adapter
from fitune.models.language_model import blocks_of
from fitune.models.low_bit.packing import quantise_blocks
from fitune.values.plan import Lora, Nf4
from models.tiny_models import tiny_model

IDS = torch.arange(3, 27).reshape(2, 12)
BOTH = ("embed_tokens", "lm_head")
LORA = Lora(rank=4, alpha=8, dropout=0.0, targets=("q_proj", "down_proj"), modules_to_save=BOTH)


def ours(model, lora=LORA):
    return add_adapters(model, lora, dtype=torch.float32, seed=3)


def moved(model):
    """As if trained: whatever trains is somewhere else."""
    torch.manual_seed(4)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def base_in(folder, *, family="llama", tied=False):
    tiny_model(family, vocab_size=260, tie_word_embeddings=tied).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_gradients_are_those_of_pefts_copies():
    mine, other = ours(tiny_model()), tiny_model()
    torch.manual_seed(3)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=list(BOTH),
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(other, config)
    found, expected = [], []
    for model, grads in ((mine, found), (theirs, expected)):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        grads += [loss, *(p.grad for p in model.parameters() if p.requires_grad)]
    assert len(found) == 1 + 2 + 2 * 2 * 3
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "tied", "saved"),
    [
        ("llama", False, BOTH), ("llama", False, ("embed_tokens",)), ("llama", True, BOTH), ("gpt2", True, BOTH),
        ("phi", False, ("lm_head",)),
    ],
)  # fmt: skip
def test_peft_loads_what_is_exported(tmp_path, family, tied, saved):
    targets = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn",), "phi": ("q_proj",)}[family]
    model = moved(
        ours(
            base_in(tmp_path / "base", family=family, tied=tied),
            replace(LORA, targets=targets, modules_to_save=saved),
        )
    )
    difference, _ = export_adapter(model, into(tmp_path / "out"), base=str(tmp_path / "base"))
    assert difference == 0.0
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert len(config["modules_to_save"]) == len(saved)
    assert_peft_answers(model, tmp_path / "base", tmp_path / "out")


@pytest.mark.parametrize("tied", [True, False])
def test_read_again_it_is_in_place_and_merged_it_is_a_model_with_the_ties_of_the_base(tmp_path, tied):
    """As scoring and an export of a checkpoint read it."""
    model = moved(ours(base_in(tmp_path / "base", tied=tied)))
    export_adapter(model, into(tmp_path / "out"), base=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reloaded = load_adapter(base, tmp_path / "out")
    assert torch.equal(answer(reloaded), answer(model))
    assert sum(p.numel() for p in reloaded.parameters()) == sum(p.numel() for p in model.parameters())
    export_merged(reloaded, into(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(answer(merged), answer(model), rtol=0, atol=1e-4)
    head, table = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
    assert (head.data_ptr() == table.data_ptr()) is tied
    assert ("lm_head.weight" in load_file(tmp_path / "merged/model.safetensors")) is not tied
    assert torch.equal(table, model.get_base_model().get_input_embeddings().weight)


@pytest.mark.parametrize("tied", [True, False])
def test_beside_a_packed_base_they_train_and_are_merged_into_the_dense_one(tmp_path, tied):
    pytest.importorskip("bitsandbytes")
    base = base_in(tmp_path / "base", tied=tied)
    quantise_blocks(blocks_of(base), Nf4())
    model = moved(ours(base, replace(LORA, base=Nf4())))
    where = {"base_path": str(tmp_path / "base")}
    export_adapter(model, into(tmp_path / "out"), base=str(tmp_path / "base"))
    export_merged(model, into(tmp_path / "merged"), **where)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    expected = answer(PeftModel.from_pretrained(dense, tmp_path / "out"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(answer(merged), expected, rtol=0, atol=1e-4)


def test_a_table_of_another_shape_is_refused(tmp_path):
    model = moved(ours(base_in(tmp_path / "base")))
    export_adapter(model, into(tmp_path / "out"), base=str(tmp_path / "base"))
    other = tiny_model(vocab_size=300)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight: \(260, 32\), expected \(300, 32\)"):
        check_adapter(tmp_path / "out", base=other)
