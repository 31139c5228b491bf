"""Gemma 3n and 4 by arithmetic and by rehearsal: what blocks share is held once, until nobody reads it."""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from fitune.errors import ModelError
from fitune.models.readers import model_config
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Zero
from laws.test_rehearsal_estimate import check
from plans import CPU, gpu, plan_for

COMMON = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 500, "max_position_embeddings": 1024, "sliding_window": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
FOR_BLOCKS = {
    "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 2000,
}  # fmt: skip
MODELS = {
    "3n": (
        "gemma3n_text", {**COMMON, **FOR_BLOCKS, "laurel_rank": 8, "activation_sparsity_pattern": [0.9] + [0.0] * 5}
    ),
    "4-small": ("gemma4_text", {**COMMON, **FOR_BLOCKS, "global_head_dim": 32, "use_double_wide_mlp": True}),
    "4-dense": (
        "gemma4_text",
        {**COMMON, **FOR_BLOCKS, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 32,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
}  # fmt: skip
FULL = {"tuning": "full", "precision": "fp32", "hardware": CPU}
LORA = {"tuning": "lora", "precision": "bf16", "hardware": gpu("h100")}
EIGHT = {"hardware": replace(CPU, gpus_per_node=8), "sharding": Zero(stage=3, backend="fsdp")}
CASES = [
    ("4-small", {**FULL, "recompute": 6, "accumulation": 2, "seq_len": 64}),
    ("3n", {**LORA, "recompute": 6}),
    ("4-dense", {**LORA, **EIGHT, "recompute": 4}),
    ("4-small", {**FULL, **EIGHT, "recompute": 2, "seq_len": 64}),
    ("3n", {**LORA, **EIGHT, "recompute": 0}),
    ("3n", {**FULL, "recompute": 3, "seq_len": 64}),
    ("4-dense", {**FULL, "recompute": 0}),
    ("4-small", {**LORA, "recompute": 4, "seq_len": 600}),
]
WEEKLY = 2
"""From this one on they run weekly. Always, the real step of such a model is: models/test_text_parts.py."""


@pytest.fixture
def spec_of(tmp_path, traces):

    def read(model_type, values):
        AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path / "model")
        return load_model_spec(str(tmp_path / "model"))

    return read


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(
            *case,
            id=f"{number}-{case[0]}",
            marks=pytest.mark.slow if number < WEEKLY else pytest.mark.weekly,
        )
        for number, case in enumerate(CASES)
    ],
)
def test_the_predicted_peak_is_the_rehearsed_one(name, choice, spec_of):
    spec = spec_of(*MODELS[name])
    plan = plan_for(spec, **{"rows": 1, "seq_len": 200, "chunk": 64, **choice})
    plan = replace(plan, model_path=spec.name)
    # divided: as other families (laws/test_rehearsal_sharded.py)
    check(plan, model_config(plan.model_path), 0.02 if "sharding" in choice else 0.01)


def test_each_kind_of_block_has_linears_of_its_own(spec_of):
    """Heads of whole rows are wider, and blocks that read others' keys make none."""
    spec = spec_of(*MODELS["4-small"])
    names = {linear.name for linear in spec.linears_of(5)}
    assert "self_attn.q_proj" in names
    assert "self_attn.k_proj" not in names
    widths = [
        next(m.out_features for m in spec.linears_of(block) if m.name == "self_attn.q_proj")
        for block in (0, 2)
    ]
    assert widths == [4 * 16, 4 * 32]


def test_a_model_whose_tokens_see_those_behind_them_is_refused(spec_of):
    model_type, values = MODELS["4-dense"]
    with pytest.raises(ModelError, match="use_bidirectional_attention = 'all' lets tokens see those behind"):
        spec_of(model_type, {**values, "use_bidirectional_attention": "all"})
