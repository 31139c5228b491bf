"""Adapters are where the plan says, in the dtype it says, and start as nothing."""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.models.adapters import add_adapters
from fitune.train.prepare import prepare_loaded
from fitune.values.counts import count_parameters
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Lora
from models.streams import forward_backward, make_rows, optimizer_step, stream_of
from models.tiny_models import load, tiny_model
from plans import plan_for

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


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_the_two_weights_of_a_learned_activation_are_counted_trained_with_all_and_frozen_under_adapters(
    tuning, tmp_path, traces
):
    """Apertus: xIELU has two in each block."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("apertus", vocab_size=97, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    attention = 2 * 32 * 32 + 2 * 32 * 16 + 2 * 8  # norms of queries and keys
    assert count_parameters(spec).total == 2 * (attention + 2 * 32 * 64 + 2 * 32 + 2) + 2 * 97 * 32 + 32
    plan = replace(plan_for(spec, tuning=tuning, rows=1, seq_len=32), model_path=spec.name)
    model = load(spec.name)
    learned = {name: p for name, p in model.named_parameters() if "alpha" in name}
    before = {name: p.detach().clone() for name, p in learned.items()}
    engine = prepare_loaded(model, plan).engine
    forward_backward(engine, stream_of(make_rows((9, 14))))
    optimizer_step(engine, 1e-2)
    assert len(learned) == 4
    moved = {name for name, p in learned.items() if not torch.equal(p, before[name])}
    assert moved == (set(learned) if tuning == "full" else set())
