"""Adapters are where the plan says, in the dtype it says, and start as nothing."""

import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.models.adapters import add_adapters
from fitune.values.plan import Lora
from models.tiny_models import tiny_model

TARGETS = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn", "c_fc")}


def lora(family):
    return Lora(rank=2, alpha=4, dropout=0.0, targets=TARGETS[family])


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_start_as_nothing_and_without_a_word(family):
    ids = torch.arange(3, 20)[None]
    before = tiny_model(family)(input_ids=ids).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        adapted = add_adapters(tiny_model(family), lora(family), dtype=torch.float32, seed=1)
    torch.testing.assert_close(adapted.eval()(input_ids=ids).logits, before)


def test_only_adapters_train_and_in_the_dtype_asked_for():
    adapted = add_adapters(tiny_model(dtype=torch.bfloat16), lora("llama"), dtype=torch.bfloat16, seed=1)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.bfloat16}
    assert len(trained) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("hunyuan_v1_moe", {"intermediate_size": 48, "moe_topk": 2, "head_dim": 8}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 48, "moe_intermediate_size": 16}),
    ],
)
def test_shared_experts_are_adapted_by_their_own_names(model_type, words):
    """Neither routed experts whose stack has such a name too, nor those that PEFT takes the names for."""
    config = AutoConfig.for_model(
        model_type, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        num_experts=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, **words,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    lora = Lora(rank=2, alpha=4, dropout=0.0, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    adapted = add_adapters(model, lora, dtype=torch.float32, seed=1)
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    assert not any(".experts." in name for name in trained)
    assert sum(trained.values()) == 2 * 2 * (32 + 32 + 3 * (32 + 48))


def test_the_seed_decides_the_start():
    first, same, other = (
        add_adapters(tiny_model(), lora("llama"), dtype=torch.float32, seed=seed).state_dict()
        for seed in (1, 1, 2)
    )
    name = next(key for key in first if "lora_A" in key)
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])
