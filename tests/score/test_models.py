"""Models with a state of another kind are scored as any other; models and adapters that would answer noise are refused,
from Python as from the command line."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from faults.adapters import edit_config, edit_weights
from fitune.errors import CheckpointError, DataError, ModelError
from fitune.estimate.blocks.key_values import elements_of_blocks
from fitune.score.engines.engine import Sampling
from fitune.score.engines.opening import choose_dtype
from fitune.score.plan import ScorePlan
from fitune.score.questions import Input
from fitune.score.run import score
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import DataSource
from jsonl import read_lines, write_lines
from models.tiny_models import beside_tokenizer, load, with_ids_moved_up
from score.scorings import quietly


@pytest.fixture
def data(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return DataSource(path=str(tmp_path / "rows.jsonl"))


def plan_for(model, data, out, adapter="", **words):
    return ScorePlan(
        model=str(model), sources=(data,), output_dir=str(out), adapter=str(adapter),
        **{"sampling": Sampling(max_new_tokens=2), **words},
    )  # fmt: skip


COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
MODELS = {
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 24},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "gemma4_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8,
        "global_head_dim": 16, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 384, "sliding_window": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_whose_state_is_more_than_keys_or_less_answers_as_it_does_one_row_at_a_time(
    model_type, model_folder, tmp_path
):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = beside_tokenizer(model, model_folder, tmp_path / "base")
    rows = [{"prompt": "word " * (3 * number + 1), "completion": "x"} for number in range(5)]
    source = DataSource(path=str(write_lines(tmp_path / "rows.jsonl", rows)))
    answers = []
    for size in (0, 1):  # as many as fit, and one
        plan = plan_for(
            folder, source, tmp_path / f"{size}", batch_size=size, sampling=Sampling(max_new_tokens=6)
        )
        quietly(plan)
        lines = read_lines(Path(plan.output_dir) / "answers.jsonl")
        answers.append([line["response"]["body"]["choices"][0]["token_ids"] for line in lines])
    assert answers[0] == answers[1]


def test_keys_that_are_values_count_twice_and_shared_ones_once():
    """Gemma 4 31B: 16 heads of 256 in a window, 4 of 512 in whole rows; E2B's last 20 blocks have none of their own."""
    assert elements_of_blocks(load_model_spec("google/gemma-4-31B"))[4:6] == [2 * 16 * 256, 2 * 4 * 512]
    small = elements_of_blocks(load_model_spec("google/gemma-4-E2B"))
    assert small[3:5] == [2 * 256, 2 * 512]
    assert small[15:] == [0] * 20


def test_a_base_whose_weights_are_no_numbers_is_refused(tiny, data, tmp_path):
    broken = shutil.copytree(tiny.folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].view(-1)[0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN or infinite: model.layers.0.mlp.up_proj.weight"):
        quietly(plan_for(broken, data, tmp_path / "out"))


@pytest.mark.parametrize(
    ("engine", "url", "listed"),
    [("transformers", "", '"</s>"'), ("server", "http://127.0.0.1:9/v1", "[1.5]")],
)
def test_a_model_whose_end_tokens_are_no_ids_is_refused_by_every_engine(
    tiny, data, tmp_path, engine, url, listed
):
    model = shutil.copytree(tiny.folder, tmp_path / "model")
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {listed}}}')
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id = .* must be a token's id"):
        quietly(plan_for(model, data, tmp_path / "out", engine=engine, url=url))


@pytest.fixture
def adapter(tiny, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(load(tiny.folder), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_that_would_be_left_out_is_refused(tiny, data, tmp_path, adapter):
    """A config cannot know what stands before the block number; the model can."""

    def renamed(found):
        return {name.replace("model.model.", "model.model.other."): tensor for name, tensor in found.items()}

    edit_weights(adapter, renamed)
    with pytest.raises(CheckpointError, match="the base has no such linear"):
        quietly(plan_for(tiny.folder, data, tmp_path / "out", adapter))


def test_a_warning_about_an_adapter_is_said(tiny, data, tmp_path, adapter):
    edit_config(adapter, base_model_name_or_path="someone/else")
    said = []
    score(plan_for(tiny.folder, data, tmp_path / "out", adapter), say=said.append)
    assert any("someone/else" in line for line in said)


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_gpu_without_bf16_scores_in_fp16(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype(torch.device("cuda")) is dtype
    assert choose_dtype(torch.device("cpu")) is torch.float32


def test_fields_of_no_format_name_their_row(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"left": "a", "right": "b"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: format auto"):
        list(Input(sources=(DataSource(path=str(rows)),)).questions())


@pytest.mark.parametrize("graders", [(), ("perplexity",)])
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows(model_folder, tmp_path, data, graders):
    mixed = with_ids_moved_up(model_folder, tmp_path / "mixed", by=384)
    with pytest.raises(ModelError, match="the embedding has 384 rows"):
        score(replace(plan_for(mixed, data, tmp_path / "out"), graders=graders))
