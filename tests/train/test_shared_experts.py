"""Mixtures with shared experts: fully trained, or by adapters on attention; others are refused with those words.

PEFT reads an adapter on shared experts as one on the routed ones, so what is exported must have none.
"""

import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

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


def mixture(model_type, words, *, tokenizer, folder):
    """A folder with a small random mixture and the tests' tokenizer."""
    shutil.copytree(tokenizer, folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    config = AutoConfig.for_model(
        model_type, **{"num_hidden_layers": 2, **words}, hidden_size=32, num_attention_heads=4, vocab_size=384,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize(("model_type", "words", "targets"), CASES)
def test_adapters_on_attention_train_and_peft_reads_them(
    model_type, words, targets, fitune,
    model_folder, data_file, tmp_path,
) :  # fmt: skip
    folder = mixture(model_type, words, tokenizer=model_folder, folder=tmp_path / "base")
    run = tmp_path / "run"
    options = (
        "--model", folder, "--data", data_file, "--gpu", "cpu", "--precision", "fp32", "--seq-len", 64,
        "--micro-batch-size", 4, "--gradient-accumulation-steps", 1, "--learning-rate", 0.05, "--max-steps", 3,
        "--save-steps", 0, "--samples", 0, "--output-dir", run, "--tuning", "lora", "--lora-r", 4,
    )  # fmt: skip
    code, said = fitune("train", *options)
    assert code == 2
    assert "as adapters on its routed experts" in said
    assert f"lora_target_modules: {targets}" in said
    assert fitune("train", *options, "--lora-target-modules", targets)[0] == 0
    assert fitune("export", run)[0] == 0
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = logits_of(base)
    adapted = logits_of(PeftModel.from_pretrained(base, str(run / "adapter")).eval())
    merged = logits_of(AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32))
    assert (adapted - before).abs().max() > 0.01
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_every_weight_of_one_is_trained_and_read_again(fitune, model_folder, data_file, tmp_path):
    folder = mixture("hunyuan_v1_moe", HUNYUAN, tokenizer=model_folder, folder=tmp_path / "base")
    code, _ = fitune(
        "train", "--model", folder, "--data", data_file, "--gpu", "cpu", "--precision", "fp32", "--seq-len", 64,
        "--micro-batch-size", 4, "--gradient-accumulation-steps", 1, "--max-steps", 2, "--save-steps", 0,
        "--samples", 0, "--output-dir", tmp_path / "run", "--tuning", "full",
    )  # fmt: skip
    assert code == 0
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (logits_of(trained) - logits_of(base)).abs().max() > 0
