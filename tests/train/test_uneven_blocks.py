"""Gemma 3n and 4: blocks that share keys and values, read embeddings of their own, or have heads of other sizes."""

import pytest

from conftest import settings_of
from runs import set_words
from train.test_shared_experts import WALK, mixture
from train.test_traced_walks import require_read_by_peft_and_transformers

WIDTHS = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 32}
FOR_BLOCKS = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384,
}  # fmt: skip
UNEVEN = {
    "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
    "global_head_dim": 16, "num_global_key_value_heads": 1,
}  # fmt: skip
MODELS = {
    "3n": ("gemma3n_text", {**FOR_BLOCKS, "laurel_rank": 4, "activation_sparsity_pattern": [0.9] + [0.0] * 5}),
    "4-small": ("gemma4_text", {**FOR_BLOCKS, "global_head_dim": 16, "use_double_wide_mlp": True}),
    "4-dense": ("gemma4_text", UNEVEN),
    "4-experts": (
        "gemma4_text",
        {**UNEVEN, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
}  # fmt: skip
EVERYWHERE = ("--lora-target-modules", "all-linear")
EXPERTS = ("--lora-target-modules", "all-linear,experts", "--lora-dropout", 0)
CASES = [
    pytest.param("3n", "qlora", EVERYWHERE, marks=pytest.mark.weekly),
    pytest.param("4-experts", "lora", EVERYWHERE),
    pytest.param("4-experts", "qlora", EXPERTS, marks=pytest.mark.slow),
    pytest.param("3n", "lora", EVERYWHERE, marks=pytest.mark.weekly),
    pytest.param("4-small", "lora", EVERYWHERE, marks=pytest.mark.slow),
    pytest.param("4-small", "qlora", EVERYWHERE, marks=pytest.mark.weekly),
    pytest.param("4-dense", "lora", EVERYWHERE, marks=pytest.mark.weekly),
    pytest.param("4-dense", "qlora", EVERYWHERE, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "tuning", "targets"), CASES)
def test_peft_reads_the_adapter_and_transformers_the_merged_model(
    name, tuning, targets, fitune,
    model_folder, data_file, tmp_path, untraced,
) :  # fmt: skip
    model_type, words = MODELS[name]
    folder = mixture(model_type, {**WIDTHS, **words}, tokenizer=model_folder, folder=tmp_path / "base")
    run = tmp_path / "run"
    options = set_words(settings_of(folder, data_file, run, tuning=tuning, **WALK))
    code, said = fitune("train", *options, *targets)
    assert code == 0, said
    assert fitune("export", run)[0] == 0
    require_read_by_peft_and_transformers(folder, run)
