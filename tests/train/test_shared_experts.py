"""Mixtures with shared experts: fully trained, or by adapters on attention; others are refused with those words.

PEFT reads an adapter on shared experts as one on the routed ones, so what is exported must have none.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import settings_of
from models.tiny_models import beside_tokenizer
from runs import set_words
from train.test_traced_walks import load, logits_of, require_read_by_peft_and_transformers

HUNYUAN = {"intermediate_size": 48, "num_experts": 4, "moe_topk": 2, "head_dim": 8, "num_key_value_heads": 2}
DEEPSEEK = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
GLM = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
ERNIE = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
PLAIN = "q_proj,k_proj,v_proj,o_proj"
LATENT = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"
CASES = [
    pytest.param("hunyuan_v1_moe", HUNYUAN, PLAIN),
    pytest.param("deepseek_v3", DEEPSEEK, LATENT, marks=pytest.mark.slow),
    pytest.param("deepseek_v2", DEEPSEEK, LATENT, marks=pytest.mark.slow),
    pytest.param("glm4_moe", GLM, PLAIN, marks=pytest.mark.slow),
    pytest.param("solar_open", GLM, PLAIN, marks=pytest.mark.slow),
    pytest.param("ernie4_5_moe", ERNIE, PLAIN, marks=pytest.mark.slow),
]


WALK = {"gradient_accumulation_steps": 1, "learning_rate": 0.05, "max_steps": 3}


def mixture(model_type, words, *, tokenizer, folder):
    """A folder with a small random mixture and the tests' tokenizer."""
    config = AutoConfig.for_model(
        model_type, **{"num_hidden_layers": 2, **words}, hidden_size=32, num_attention_heads=4, vocab_size=384,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return beside_tokenizer(model, tokenizer, folder)


@pytest.mark.parametrize(("model_type", "words", "targets"), CASES)
def test_adapters_on_attention_train_and_peft_reads_them(
    model_type, words, targets, fitune,
    model_folder, data_file, tmp_path, untraced,
) :  # fmt: skip
    folder = mixture(model_type, words, tokenizer=model_folder, folder=tmp_path / "base")
    run = tmp_path / "run"
    options = set_words(settings_of(folder, data_file, run, **WALK))
    code, said = fitune("train", *options)
    assert code == 2
    assert "as adapters on its routed experts" in said
    assert f"lora_target_modules: {targets}" in said
    assert fitune("train", *options, "--lora-target-modules", targets)[0] == 0
    assert fitune("export", run)[0] == 0
    require_read_by_peft_and_transformers(folder, run)


@pytest.mark.slow
def test_every_weight_of_one_is_trained_and_read_again(fitune, model_folder, data_file, tmp_path, untraced):
    folder = mixture("hunyuan_v1_moe", HUNYUAN, tokenizer=model_folder, folder=tmp_path / "base")
    options = set_words(settings_of(folder, data_file, tmp_path / "run", tuning="full"))
    assert fitune("train", *options)[0] == 0
    assert (logits_of(load(tmp_path / "run/model")) - logits_of(load(folder))).abs().max() > 0
