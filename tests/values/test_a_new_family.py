"""A family of models is added in one place: values/model/families.py reads its config, nothing else knows its name."""

import ast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.estimate.predict import predict_memory
from fitune.rehearse.step import trace_plan
from fitune.train.prepare import prepare_loaded
from fitune.values.counts import count_parameters
from fitune.values.model.families import FAMILIES, read_llama
from fitune.values.model.model_config import spec_from_config
from models.streams import forward_backward, optimizer_step, stream_of
from plans import plan_for
from rehearse.tiny_configs import tensor_peak
from sources import ROOT

READERS = {
    "values/model/families.py",
    "values/model/model_config.py",
    "values/model/config_schema.py",
    "values/model/architectures.py",
}
"""Of config.json, and what was compared with transformers; they alone decide by a model's type."""


@pytest.fixture
def toy(monkeypatch):
    """A family that fitune does not know, and one line that makes it known: blocks like Llama's."""
    monkeypatch.setitem(FAMILIES, "seed_oss", read_llama)
    config = AutoConfig.for_model(
        "seed_oss", vocab_size=300, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=176, attention_bias=False, attention_dropout=0.0,
        residual_dropout=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    return config, spec_from_config(config.to_dict(), name="toy")


def test_its_parameters_are_counted(toy):
    config, spec = toy
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(spec).total == sum(p.numel() for p in model.parameters())


def test_its_memory_is_predicted_and_it_trains(toy):
    config, spec = toy
    plan = plan_for(spec, rows=1, tuning="lora", recompute=2)
    trace, _ = trace_plan(plan, config, exact=True)
    rehearsed = tensor_peak(trace)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(rehearsed, rel=0.02)
    torch.manual_seed(0)
    prepared = prepare_loaded(AutoModelForCausalLM.from_config(config), plan)
    losses = []
    for _ in range(2):
        rows = stream_of([torch.arange(1, 65)])
        ended = forward_backward(prepared.engine, rows, 63)
        optimizer_step(prepared.engine, 1e-2)
        losses.append(float(ended))
    assert losses[1] < losses[0]


def test_nothing_else_decides_by_a_models_type():
    texts = {
        path: path.read_text() for path in ROOT.rglob("*.py") if str(path.relative_to(ROOT)) not in READERS
    }
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in texts.items()
        if ".model_type" in text  # a syntax tree of every file takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.Attribute) and side.attr == "model_type"
    ]
    assert not found
