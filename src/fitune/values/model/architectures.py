"""Architectures without formulas that training was held against transformers' own forward for."""

from collections.abc import Iterable

from fitune.values.model.model_spec import ModelSpec

EQUAL_TO_TRANSFORMERS = frozenset(
    (
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "axk1",
        "bamba",
        "biogpt",
        "bitnet",
        "codegen",
        "cohere",
        "cohere2",
        "cwm",
        "diffllama",
        "ernie4_5",
        "exaone",
        "exaone4",
        "falcon_h1",
        "falcon_mamba",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jamba",
        "kolibri1",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "llama4_text",
        "mamba",
        "mamba2",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ministral",
        "ministral3",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "opt",
        "persimmon",
        "qwen2_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    )
)
"""Values of model_type: a small random model of each has the losses and gradients of transformers' own forward, fully
trained, with LoRA and with LoRA on NF4 (bench/architectures.py)."""


ADAPTED_IN_ATTENTION = frozenset(
    (
        "afmoe",
        "beam",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "glm4_moe_lite",
        "hunyuan_v1_moe",
        "laguna",
        "lara_mini",
        "qwen3_next",
        "sarvam_mla",
        "sarvam_moe",
        "solar_open",
    )
)
"""They are equal, too, and their adapters go on attention alone: PEFT (0.19 to 0.21, huggingface/peft issue 3711) reads
an adapter on shared experts or dense blocks, which have the names of SHARED_LINEARS, as one on the routed experts."""
SHARED_LINEARS = ("gate_proj", "up_proj", "down_proj")


def trains_like_transformers(model: ModelSpec) -> bool:
    """True if its way through fitune was compared with transformers' own."""
    return not model.is_traced or model.model_type in EQUAL_TO_TRANSFORMERS | ADAPTED_IN_ATTENTION


def takes_adapters_on(model: ModelSpec, targets: Iterable[str]) -> bool:
    """True if PEFT reads adapters on all of ``targets`` back where they were trained."""
    last = {target.rpartition(".")[2] for target in targets}
    return model.model_type not in ADAPTED_IN_ATTENTION or last.isdisjoint(SHARED_LINEARS)


_CACHES_EVERY_HEAD = frozenset(("minicpm3",))
"""MLA of which vLLM keeps keys and values, too."""


def caches_latent(model: ModelSpec) -> bool:
    """True if vLLM caches the one vector that keys and values of all heads are made of (MLA)."""
    has_latent = any(linear.short_name == "kv_a_proj_with_mqa" for linear in model.linears)
    return has_latent and model.model_type not in _CACHES_EVERY_HEAD


_REPEATED_KEYS = frozenset(("mistral", "qwen2"))


def repeated_keys_once(model: ModelSpec) -> bool:
    """True if transformers up to 4.47 repeated keys and values for every query head before flash attention
    (models/mistral and models/qwen2, …FlashAttention2.forward; Llama's were not)."""
    return model.model_type in _REPEATED_KEYS
