"""Architectures without formulas that training was held against transformers' own forward for."""

from fitune.spec.model.model_spec import ModelSpec

EQUAL_TO_TRANSFORMERS = frozenset(
    (
        "apertus",
        "arcee",
        "bamba",
        "bitnet",
        "codegen",
        "cohere",
        "cohere2",
        "ernie4_5",
        "falcon_h1",
        "falcon_mamba",
        "flex_olmo",
        "gemma",
        "glm",
        "glm4",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "internlm3",
        "iquestcoder",
        "jais2",
        "lfm2",
        "llama4_text",
        "mamba",
        "mamba2",
        "mellum",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ministral",
        "ministral3",
        "nanochat",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "qwen2_moe",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    )
)
"""Values of model_type: a small random model of each has the losses and gradients of transformers' own forward, fully
trained, with LoRA and with LoRA on NF4 (bench/architectures.py)."""


def trains_like_transformers(model: ModelSpec) -> bool:
    """True if its way through fitune was compared with transformers' own."""
    return not model.is_traced or model.model_type in EQUAL_TO_TRANSFORMERS
