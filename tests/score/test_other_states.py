"""Models whose state is more than keys and values, or less: they are scored, whatever is known of its bytes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.estimate.blocks.key_values import elements_of_blocks
from fitune.score.engines.opening import room_for
from fitune.score.plan import ScorePlan
from fitune.values.answering import Questions
from fitune.values.model.model_config import load_model_spec
from jsonl import read_lines, write_lines
from models.tiny_models import beside_tokenizer

COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
MODELS = {
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "gemma4_text": {
        "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 384, "sliding_window": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
def test_they_are_scored_with_the_answers_of_one_row_at_a_time(model_type, call, model_folder, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = beside_tokenizer(model, model_folder, tmp_path / "base")
    rows = [{"prompt": "word " * (3 * number + 1), "completion": "x"} for number in range(5)]
    write_lines(tmp_path / "rows.jsonl", rows)
    answers = []
    for name, words in (("fitting", ()), ("alone", ("--batch-size", 1))):
        call(
            "score", "--model", folder, "--data", tmp_path / "rows.jsonl", "--grader", "exact_match",
            "--max-new-tokens", 6, "--out", tmp_path / name, *words,
        ).ends(0)  # fmt: skip
        lines = read_lines(tmp_path / name / "answers.jsonl")
        answers.append([line["response"]["body"]["choices"][0]["token_ids"] for line in lines])
    assert answers[0] == answers[1]


def test_a_state_that_is_not_known_to_grow_is_asked_by_32_rows():
    long = Questions(rows=1_000, prompt_tokens=3_000_000, longest_prompt=3_000, new_tokens=256)
    assert room_for(ScorePlan(model="state-spaces/mamba-2.8b-hf", output_dir=""))(long) == 32


def test_keys_that_are_values_count_twice_and_shared_ones_once():
    """Gemma 4 31B: 16 heads of 256 in a window, 4 of 512 in whole rows; E2B's last 20 blocks have none of their own."""
    assert elements_of_blocks(load_model_spec("google/gemma-4-31B"))[4:6] == [2 * 16 * 256, 2 * 4 * 512]
    small = elements_of_blocks(load_model_spec("google/gemma-4-E2B"))
    assert small[3:5] == [2 * 256, 2 * 512]
    assert small[15:] == [0] * 20
