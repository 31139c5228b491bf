"""Small models of many families: transformers' config and the ModelSpec of the same shapes."""

from transformers import AutoConfig

from fitune.rehearse.trace import peaks_by_kind
from fitune.values.model.model_config import spec_from_config

_GATED = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 176, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gemma2": {"head_dim": 16, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 16, "sliding_window": 512},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen3_moe": {
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
}
OTHERS = {
    "phi": {"intermediate_size": 256, "num_key_value_heads": None},
    "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "num_key_value_heads": None},
    "falcon": {"alibi": False, "parallel_attn": True, "multi_query": True, "new_decoder_architecture": False},
}
"""Those that most grids leave out."""


def tiny(family, **different):
    config = AutoConfig.for_model(
        family, **{**_GATED, **FAMILIES.get(family, {}), **OTHERS.get(family, {}), **different}
    )
    values = {**config.to_dict(), "dtype": None, "torch_dtype": None}
    return config, spec_from_config(values, name=f"tiny/{family}")


def tensor_peak(trace):
    """A CPU's tensors are not rounded to blocks; a model this small would be blocks more than bytes."""
    return max(sum(kinds.values()) for kinds in peaks_by_kind(trace, on_cuda=False).values())
