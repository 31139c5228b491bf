"""Small models of the architectures without formulas, from `fitune train` to what PEFT and transformers read.

PEFT reads an adapter on shared experts as one on the routed ones, so what is exported has none: such plans are refused
with the linears that can be adapted. Blocks of Gemma 3n and 4 share keys and values, read embeddings of their own, or
have heads of other sizes.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import settings_of
from fitune.recipe.targets import resolve_targets
from fitune.values.model.architectures import SHARED_LINEARS, takes_adapters_on
from fitune.values.model.model_config import load_model_spec
from models.tiny_models import beside_tokenizer
from runs import set_words

QUICK = ("hyperclovax", "hunyuan_v1_moe", "4-experts")
SLOW = (
    "jamba", "minicpm3", "qwen3_next",  # routed experts and states along the row, latent keys, a delta rule
    "deepseek_v3", "deepseek_v2", "glm4_moe", "solar_open", "ernie4_5_moe", "4-small",
)  # fmt: skip
WEEKLY = (
    "afmoe", "aria_text", "axk1", "beam", "biogpt", "cohere2_moe", "cwm", "diffllama", "dots1", "exaone4",
    "exaone_moe", "flint", "glm4_moe_lite", "gpt_neox_japanese", "granitemoe_swa", "hy_v3", "kolibri1", "laguna",
    "lfm2_moe", "lfm3", "mimo_v2_flash", "nemotron", "olmo_hybrid", "opt", "qwen3_5_moe_text", "qwen3_5_text",
    "3n", "4-dense",
)  # fmt: skip
WHOLE = ("jamba", "minicpm3", "hunyuan_v1_moe")
WHOLE_WEEKLY = ("axk1", "diffllama", "hyperclovax", "lfm2_moe", "qwen3_5_text")
STATEFUL = ("jamba", "lfm2_moe", "lfm3")

MIXTURE = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
ROUTED = {
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK = {
    **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GLM = {**ROUTED, "num_key_value_heads": 2, "head_dim": 8}
ERNIE = {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
SLIDING = {**MIXTURE, "sliding_window": 32}
FOR_BLOCKS = {
    **SLIDING, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384,
}  # fmt: skip
UNEVEN = {
    **SLIDING, "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True, "global_head_dim": 16, "num_global_key_value_heads": 1,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
MADE = {
    "hunyuan_v1_moe": {**MIXTURE, "num_experts": 4, "moe_topk": 2},
    "deepseek_v3": DEEPSEEK, "deepseek_v2": DEEPSEEK, "glm4_moe": GLM, "solar_open": GLM,
    "ernie4_5_moe": {**MIXTURE, **ERNIE, "moe_layer_start_index": 1},
    "3n": {
        **FOR_BLOCKS, "model_type": "gemma3n_text", "laurel_rank": 4, "activation_sparsity_pattern": [0.9] + [0.0] * 5,
    },
    "4-small": {**FOR_BLOCKS, "model_type": "gemma4_text", "global_head_dim": 16, "use_double_wide_mlp": True},
    "4-dense": {**UNEVEN, "model_type": "gemma4_text"},
    "4-experts": {**UNEVEN, **EXPERTS, "model_type": "gemma4_text"},
}  # fmt: skip
"""Name, or where it says no other the model type, -> its config, beside what all have."""


def bench():
    """bench/architectures.py, which has the small configs that losses were compared with."""
    file = Path(__file__).parents[2] / "bench/architectures.py"
    spec = importlib.util.spec_from_file_location("bench_architectures", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(model_folder, tmp_path):
    """Makes a folder with a small random model of this name and the tests' tokenizer."""

    def make(name):
        torch.manual_seed(0)
        if name in MADE:
            common = {"model_type": name, "num_hidden_layers": 2, "initializer_range": 0.2}
            words = {**common, **MADE[name], "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 384}
            ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 128}
            config = AutoConfig.for_model(words.pop("model_type"), **words, **ids)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            made = bench()
            model = AutoModelForCausalLM.from_config(made.small_config(name), dtype=torch.float32)
            made._randomise(model)
        return beside_tokenizer(model, model_folder, tmp_path / "base")

    return make


@pytest.fixture
def train(fitune, data_file, tmp_path):
    """`fitune train` of a folder, by rows that would see each other one at a time."""

    def run(folder, *words, **others):
        rows = {"micro_batch_size": 1, "packing": False}
        rows = {} if load_model_spec(str(folder)).separates_rows else rows
        once = {"gradient_accumulation_steps": 1, "learning_rate": 0.05, **rows, **others}
        return fitune("train", *set_words(settings_of(folder, data_file, tmp_path / "run", **once)), *words)

    return run


def logits_of(folder, adapter=None):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None], use_cache=False).logits


def marked(slow, weekly):
    return [
        *(pytest.param(name, marks=pytest.mark.slow) for name in slow),
        *(pytest.param(name, marks=pytest.mark.weekly) for name in weekly),
    ]


def require_read(folder, run):
    """The adapter of a run changes the logits, and PEFT reads it as transformers the merged model."""
    adapted = logits_of(folder, run / "adapter")
    assert (adapted - logits_of(folder)).abs().max() > 0.01
    torch.testing.assert_close(logits_of(run / "merged"), adapted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [*QUICK, *marked(SLOW, WEEKLY)])
def test_adapters_on_all_linears_that_are_taken_are_read_by_peft_as_the_merged_model_by_transformers(
    name, small, train, fitune, tmp_path, untraced
) :  # fmt: skip
    folder, words = small(name), ()
    spec = load_model_spec(str(folder))
    targets = resolve_targets(spec, ("all-linear",))
    if not takes_adapters_on(spec, targets):
        code, said = train(folder, max_steps=3)
        others = ",".join(name for name in targets if name.rpartition(".")[2] not in SHARED_LINEARS)
        assert code == 2
        assert "as adapters on its routed experts" in said
        assert f"lora_target_modules: {others}" in said
        words = ("--lora-target-modules", others)
    assert train(folder, *words, max_steps=3)[0] == 0
    assert fitune("export", tmp_path / "run")[0] == 0
    require_read(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param("4-experts", "all-linear,experts", marks=pytest.mark.slow),
        pytest.param("4-dense", "all-linear", marks=pytest.mark.slow),
        pytest.param("3n", "all-linear", marks=pytest.mark.weekly),
        pytest.param("4-small", "all-linear", marks=pytest.mark.weekly),
    ],
)
def test_so_are_those_on_a_packed_base(name, targets, small, train, fitune, tmp_path, untraced):
    folder = small(name)
    words = ("--lora-target-modules", targets, "--lora-dropout", 0)
    code, said = train(folder, *words, tuning="qlora", max_steps=3)
    assert code == 0, said
    assert fitune("export", tmp_path / "run")[0] == 0
    require_read(folder, tmp_path / "run")


@pytest.mark.parametrize("name", marked(WHOLE, WHOLE_WEEKLY))
def test_every_weight_is_trained_and_read_by_transformers(name, small, train, tmp_path):
    folder = small(name)
    assert train(folder, tuning="full")[0] == 0
    trained = logits_of(tmp_path / "run/model")
    assert torch.isfinite(trained).all()
    assert (trained - logits_of(folder)).abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_along_the_row_takes_one_row_at_a_time(name, small, train):
    folder = small(name)
    assert not load_model_spec(str(folder)).separates_rows
    code, said = train(folder, packing=True)
    assert code == 2
    assert "packing: false with micro_batch_size: 1" in said
