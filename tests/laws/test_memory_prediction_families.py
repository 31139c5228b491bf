"""Predicted against measured for every architecture: q/k norms, tied embeddings, mixtures, parallel blocks, fused
projections, LayerNorms, capped and broadcast attention. Tolerance 3 % of the peak."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.measure.memory import LiveTensors
from fitune.models.weights import compute_dtype
from fitune.spec.model_config import spec_from_config
from fitune.train.prepare import prepare_loaded
from laws.test_memory_prediction import bench

TOLERANCE = 0.03
ROWS = (32, 32, 32)

_COMMON = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_GATED = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 176}
_MIXED = {"num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2}
_FALCON = {
    **_COMMON,
    "alibi": False,
    "bias": False,
    "parallel_attn": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen2": {**_GATED, "tie_word_embeddings": True},
    "qwen3": {**_GATED, "head_dim": 16},
    "gemma2": {**_GATED, "head_dim": 16, "sliding_window": 512},
    "gemma3_text": {**_GATED, "head_dim": 16, "sliding_window": 512},
    "phi3": {**_GATED, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "phi": {**_COMMON, "intermediate_size": 256},
    "gpt2": {"vocab_size": 300, "n_embd": 64, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "attn_pdrop": 0.0,
             "embd_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
    "falcon": {**_FALCON, "multi_query": True, "new_decoder_architecture": False},
    "falcon, grouped": {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    "mixtral": {**_GATED, **_MIXED, "num_local_experts": 4},
    "qwen3_moe": {**_GATED, **_MIXED, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured_peak(config, plan, rows) -> int:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(compute_dtype(plan.precision))
    prepared = prepare_loaded(model, plan)

    def step(enter) -> None:
        prepared.engine.forward_backward(rows, supervised_tokens=rows.supervised_tokens, enter_phase=enter)
        prepared.engine.update(learning_rate=1e-4, enter_phase=enter)

    step(lambda phase: None)
    tracker = LiveTensors(prepared.resident_tensors())
    with tracker:
        step(tracker.enter)
    return max(tracker.peaks.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("tuning", "precision", "recompute"), [("full", "fp32", 0), ("lora", "bf16", 2)])
def test_peak_of_the_family_is_predicted(family, tuning, precision, recompute):
    config = AutoConfig.for_model(family.partition(",")[0], **CONFIGS[family])
    model = spec_from_config({**config.to_dict(), "dtype": None, "torch_dtype": None}, name=f"tiny/{family}")
    plan = bench.plan_of(model, tuning=tuning, precision=precision, recompute=recompute, chunked=True)
    rows = bench.random_rows(ROWS, vocab_size=model.vocab_size)
    predicted = max(bench.predicted_peaks(plan, rows).values())
    assert predicted == pytest.approx(measured_peak(config, plan, rows), rel=TOLERANCE)
