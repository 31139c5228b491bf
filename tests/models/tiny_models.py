"""Tiny random models of every family, built from a config: no download."""

import json
import shutil

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.models.weights import load_model

_COMMON = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GATED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_CONFIGS = {
    "llama": _GATED,
    "mistral": {**_GATED, "sliding_window": 6},
    "qwen2": _GATED,
    "qwen3": {**_GATED, "tie_word_embeddings": True},
    "gemma2": {**_GATED, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_GATED, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "phi3": {**{k: v for k, v in _GATED.items() if k != "head_dim"}, "sliding_window": None},
    "phi": {**_COMMON, "intermediate_size": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "mixtral": {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_GATED, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {
        "vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "falcon": {
        **_COMMON, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False,
        "alibi": False,
    },
}  # fmt: skip
FAMILIES = tuple(_CONFIGS)


def tiny_model(family="llama", *, seed=0, **changes):
    """Random fp32 weights, larger than usual so that attention and softcaps matter."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_CONFIGS[family], "initializer_range": 0.2, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)


def with_ids_moved_up(folder, to, *, by):
    """A copy of the model folder whose tokenizer gives ids that the embedding may have no rows for."""
    shutil.copytree(folder, to)
    content = json.loads((to / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: id + by for token, id in vocabulary.items()}
    (to / "tokenizer.json").write_text(json.dumps(content))
    return to


def load(folder, *, dtype=torch.float32, **named):
    return load_model(str(folder), dtype=dtype, device=torch.device("cpu"), **named)


def beside_tokenizer(model, base, folder):
    """``folder`` with the model, and the tokenizer of the model in ``base``."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*token*"):
        shutil.copy(file, folder)
    model.save_pretrained(folder)
    return folder
