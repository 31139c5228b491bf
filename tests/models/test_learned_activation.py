"""Apertus: the two weights of its xIELU activation are counted, trained with everything, and frozen under LoRA."""

from dataclasses import replace

import pytest
import torch
from transformers import ApertusConfig, ApertusForCausalLM

from fitune.train.prepare import prepare_loaded
from fitune.values.counts import count_parameters
from fitune.values.model.architectures import trains_like_transformers
from fitune.values.model.model_config import load_model_spec
from models.streams import forward_backward, make_rows, optimizer_step, stream_of
from models.tiny_models import load
from plans import plan_for

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
ROWS = make_rows((9, 14))


@pytest.fixture
def spec(tmp_path, traces):
    torch.manual_seed(0)
    ApertusForCausalLM(ApertusConfig(**SMALL)).save_pretrained(tmp_path / "apertus")
    return load_model_spec(str(tmp_path / "apertus"))


def test_two_weights_in_each_block_are_counted(spec):
    h, f, heads = 32, 64, 8
    attention = 2 * h * h + 2 * h * 2 * heads + 2 * heads
    block = attention + 2 * h * f + 2 * h + 2
    assert count_parameters(spec).total == 2 * block + 2 * 200 * h + h


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_they_are_trained_with_everything_and_frozen_under_adapters(spec, tuning):
    plan = replace(plan_for(spec, tuning=tuning, rows=1, seq_len=32, precision="fp32"), model_path=spec.name)
    assert trains_like_transformers(spec)
    model = load(spec.name)
    learned = {name: p for name, p in model.named_parameters() if "alpha" in name}
    before = {name: p.detach().clone() for name, p in learned.items()}
    prepared = prepare_loaded(model, plan)
    stream = stream_of(ROWS)
    forward_backward(prepared.engine, stream)
    optimizer_step(prepared.engine, 1e-2)
    assert len(learned) == 4
    moved = {name for name, p in learned.items() if not torch.equal(p, before[name])}
    assert moved == (set(learned) if tuning == "full" else set())
