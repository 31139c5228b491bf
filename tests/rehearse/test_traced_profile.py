"""Architectures without formulas: shapes read from modules, blocks traced, an estimate equal to the rehearsed step."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.errors import FituneError, ModelError
from fitune.estimate.predict import predict, predict_memory
from fitune.models.readers import model_config
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.rehearse.profile import TransformersTracer
from fitune.rehearse.step import trace_plan
from fitune.values.counts import count_parameters, lora_parameters, model_flops
from fitune.values.model import tracing
from fitune.values.model.block_profile import BatchShape, TracedStep
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.tracer import trace_with
from fitune.values.plan import ClipByValue, Full, Lomo, Lora, Sgd
from fitune.values.serial import from_json, to_json
from laws.test_rehearsal_estimate import check
from plans import CPU, gpu, plan_for
from rehearse.tiny_configs import tensor_peak

NEOX = {
    "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 4, "num_attention_heads": 6,
    "vocab_size": 400, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
NEO = {
    "hidden_size": 64, "intermediate_size": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 400, "window_size": 32,
    "max_position_embeddings": 256, "attention_types": [[["global", "local"], 2]], "resid_dropout": 0.0,
    "embed_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 400,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def model_of(tmp_path, model_type, config):
    AutoConfig.for_model(model_type, **config).save_pretrained(tmp_path / model_type)
    return load_model_spec(str(tmp_path / model_type))


def test_shapes_are_counted_by_hand(tmp_path, traces):
    spec = model_of(tmp_path, "gpt_neox", NEOX)
    h, f = 96, 224
    block = 3 * h * h + 3 * h + h * h + h + 2 * h * f + f + h + 4 * h
    assert count_parameters(spec).total == 4 * block + 2 * 400 * h + 2 * h
    lora = Lora(rank=8, alpha=8, dropout=0.0, targets=("query_key_value", "dense_4h_to_h"))
    assert lora_parameters(spec, lora) == 4 * 8 * (h + 3 * h + f + h)
    names = [m.short_name for m in spec.linears]
    assert names == ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]


def test_blocks_that_differ_are_counted_apart(tmp_path, traces):
    spec = model_of(tmp_path, "deepseek_v3", DEEPSEEK)
    assert spec.kind_of == (0, 0, 1, 1, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(spec.name))
    assert count_parameters(spec).total == sum(p.numel() for p in model.parameters())
    experts = [(m.copies, m.active_copies) for m in spec.linears if m.part == "experts"]
    assert experts == [(4, 2), (4, 2)]
    idle = 3 * 2 * 3 * 64 * 32  # three blocks, two of four experts, gate, up and down
    assert count_parameters(spec).total - count_parameters(spec).active == idle
    assert model_flops(spec, Full(), row_lengths=(8,), supervised_tokens=8) > 6 * 8 * (5 * 64 * 128)


@pytest.mark.parametrize(
    ("hardware", "choice"),
    [
        ("cpu", {"precision": "bf16", "tuning": "full", "rows": 1, "recompute": 2}),
        pytest.param(
            "h100",
            {"precision": "bf16", "tuning": "lora", "rows": 2, "accumulation": 2, "attention": "flash"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_estimate_is_the_rehearsed_step(tmp_path, traces, hardware, choice):
    """At 320 tokens, which were not traced; to 0.5 % of the peak."""
    spec = model_of(tmp_path, "gpt_neox", NEOX)
    device = CPU if hardware == "cpu" else gpu(hardware)
    plan = replace(plan_for(spec, hardware=device, seq_len=320, chunk=64, **choice), model_path=spec.name)
    check(plan, model_config(spec.name), 0.005)
    assert predict(plan).tokens_per_second > 0


@pytest.mark.parametrize(("adaptive", "recompute"), [(True, 0), (False, 4)])
def test_weights_updated_in_backward_are_planned_from_the_profile_of_full(
    tmp_path, traces, adaptive, recompute
):
    """One gradient at a time, and its step beside what its block keeps."""
    spec = model_of(tmp_path, "gpt_neox", NEOX)
    full = plan_for(spec, precision="bf16", recompute=recompute, rows=1, seq_len=200)
    method = Lomo(adaptive=adaptive, clip=ClipByValue(value=1.0))
    plan = replace(full, tuning=method, optimizer=Sgd(), model_path=spec.name)
    shape = BatchShape(tokens=200, supervised_tokens=199, rows=1)
    assert tracing.way_of(plan, shape).digest == tracing.way_of(full, shape).digest
    trace, _ = trace_plan(plan, model_config(spec.name), exact=True)
    rehearsed = tensor_peak(trace)
    assert -0.005 < predict_memory(plan).tensor_peak_bytes / rehearsed - 1 < 0.02


def test_no_row_is_traced_beyond_a_mask_that_blocks_keep(tmp_path, traces, capfd):
    """GPT-Neo's blocks take 256 tokens in all; the estimate at other lengths is the rehearsed step, to 0.5 %."""
    spec = model_of(tmp_path, "gpt_neo", NEO)
    assert spec.longest_stream == 256
    for rows in (1, 2):
        plan = replace(plan_for(spec, rows=rows, seq_len=200 // rows), model_path=spec.name)
        way = tracing.way_of(plan, BatchShape(tokens=200, supervised_tokens=200, rows=rows))
        assert way.rows * way.first * tracing.LENGTHS[-1] == 256
    check(plan, model_config(spec.name), 0.005)
    assert capfd.readouterr().err == ""


def test_micro_batches_longer_than_the_mask_are_refused(tmp_path, traces):
    spec = model_of(tmp_path, "gpt_neo", NEO)
    recipe = parse_recipe({"model": spec.name, "seq_len": 200, "micro_batch_size": 2})
    with pytest.raises(FituneError, match="256 tokens in one micro-batch, and 2 × 200 are more"):
        find_plan(recipe, model=spec, hardware=CPU)


def test_blocks_that_cannot_run_are_refused_in_one_line(tmp_path, traces, capfd):
    """torch logs a traceback of its own before the error."""
    spec = model_of(tmp_path, "gpt_neo", NEO)
    plan = replace(plan_for(spec, rows=1, seq_len=200), model_path=spec.name)
    with pytest.raises(ModelError, match="its blocks cannot be traced: Attempting to broadcast"):
        TransformersTracer().profile(tracing.Way(plan=plan, rows=1, first=128))
    assert capfd.readouterr().err == ""


OTHERWISE = {
    "loops over its blocks": (
        "xlstm", {"num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4}, "runs its blocks several times",
    ),
    "blocks that share weights": (
        "zamba2",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_attention_heads": 4,
         "mamba_ngroups": 1, "num_mem_blocks": 1, "mamba_d_state": 16, "n_mamba_heads": 8},
        "blocks of Zamba2ForCausalLM share weights",
    ),
    "a head of other tokens": ("cpmant", {"dim_head": 16, "prompt_types": 2}, "one vocabulary for both"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERWISE)
def test_models_whose_parts_are_counted_otherwise_are_refused(tmp_path, traces, name):
    model_type, values, words = OTHERWISE[name]
    with pytest.raises(ModelError, match=words):
        model_of(tmp_path, model_type, {"hidden_size": 64, "vocab_size": 400, **values})


def test_a_later_plan_traces_nothing(tmp_path, untraced, monkeypatch):
    cache = Path(os.environ["FITUNE_CACHE"]) / "traced"
    trace_with(TransformersTracer)
    spec = model_of(tmp_path, "gpt_neox", NEOX)
    plan = replace(plan_for(spec, seq_len=64), model_path=spec.name)
    first = predict_memory(plan)
    assert len(list(cache.glob("*.json"))) == 2  # shapes, and one way of training
    monkeypatch.setattr(tracing, "_known", {})
    trace_with(None)
    assert load_model_spec(spec.name) == spec
    assert predict_memory(replace(plan, batch=replace(plan.batch, seq_len=96))).peak_bytes > first.peak_bytes
    next(cache.glob("*.shapes.*.json")).write_text("{")
    with pytest.raises(ModelError, match="its shapes are not known here yet"):  # a damaged file is no file
        load_model_spec(spec.name)


def test_a_profile_survives_json(tmp_path, traces):
    spec = model_of(tmp_path, "gpt_neox", NEOX)
    plan = replace(plan_for(spec, precision="bf16"), model_path=spec.name)
    step = tracing.profile_for(plan, BatchShape(tokens=128, supervised_tokens=126, rows=2))
    assert from_json(TracedStep, to_json(step)) == step
    linear = 2 * (3 * 96 * 96 + 96 * 96 + 2 * 96 * 224)
    assert step.blocks[0].there.flops.per_token == linear
    assert step.blocks[0].back.flops.per_token == 2 * linear
    assert step.blocks[0].flops_per_pair == 12 * 96
