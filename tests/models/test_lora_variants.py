"""rsLoRA, LoRA in some blocks and by whole names: the same model as PEFT makes of the same words."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from checkpoint.tiny_export import into, with_random_b
from fitune.checkpoint.export import export_adapter, export_merged
from fitune.models.adapters import add_adapters
from fitune.values.plan import Lora
from models.tiny_models import tiny_model

IDS = torch.arange(3, 27).reshape(2, 12)
PLAIN = Lora(rank=4, alpha=8, dropout=0.0, targets=("q_proj", "down_proj"))
VARIANTS = {
    "rslora": (replace(PLAIN, rslora=True), {"use_rslora": True}),
    "some blocks": (replace(PLAIN, layers=(0, 2)), {"layers_to_transform": [0, 2]}),
    "both, with DoRA": (
        replace(PLAIN, rslora=True, layers=(1,), dora=True),
        {"use_rslora": True, "layers_to_transform": [1], "use_dora": True},
    ),
}


def ours(lora, model):
    return add_adapters(model, lora, dtype=torch.float32, seed=3)


def theirs(words, model):
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **words
    )
    return get_peft_model(model, config)


def filled(model):
    """B is no longer zero, the same in both."""
    torch.manual_seed(4)
    return with_random_b(model)


def gradients(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_gradients_are_pefts(variant):
    lora, words = VARIANTS[variant]
    mine, peft = filled(ours(lora, tiny_model())), filled(theirs(words, tiny_model()))
    assert torch.equal(mine(input_ids=IDS).logits, peft(input_ids=IDS).logits)
    found, expected = gradients(mine), gradients(peft)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_whole_name_adapts_one_of_two_linears():
    lora = Lora(rank=2, alpha=4, dropout=0.0, targets=("attn.c_proj",))
    adapted = ours(lora, tiny_model("gpt2"))
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 3
    assert all(".attn.c_proj." in name for name in names)
    assert torch.isfinite(filled(adapted)(input_ids=IDS).logits).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_exported_peft_loads_and_the_merged_model_answers_the_same(tmp_path, variant):
    tiny_model(vocab_size=260).save_pretrained(tmp_path / "base")
    model = filled(ours(VARIANTS[variant][0], AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
    difference, _ = export_adapter(model, into(tmp_path / "adapter"), base=str(tmp_path / "base"))
    assert difference == 0.0
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    words = VARIANTS[variant][1]
    assert {key: config[key] for key in words} == words
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(reloaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    export_merged(model, into(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-4)
