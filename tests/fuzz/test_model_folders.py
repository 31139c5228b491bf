"""Model folders and adapters from strangers: every JSON file with values changed, every file with bytes damaged."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.conftest import copied, settings_of
from fuzz.hostile import as_json, changed, damaged, nested_json

pytestmark = pytest.mark.fuzz

SHAPES = {
    "llama": {"num_key_value_heads": 2, "rope_theta": 1e4, "rope_scaling": None, "attention_dropout": 0.0},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 50.0},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": {
        "num_key_value_heads": 2, "original_max_position_embeddings": 16, "max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "attn_pdrop": 0.1},
}  # fmt: skip
COMMON = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def config_of(family):
    return {"model_type": family, **COMMON, **SHAPES[family]}


@given(st.sampled_from(sorted(SHAPES)).flatmap(lambda family: changed(config_of(family))))
def test_configs_are_planned_or_refused(orderly, tmp_path_factory, config):
    folder = tmp_path_factory.getbasetemp() / "planned"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(as_json(config))
    orderly("plan", "--model", str(folder), "--gpu", "rtx-4090")


JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@given(st.data())
def test_folders_are_trained_or_refused(
    orderly,
    model_folder,
    data_file,
    tmp_path_factory,
    data,
):
    base = tmp_path_factory.getbasetemp()
    folder = copied(model_folder, base / "odd-model")
    name = data.draw(st.sampled_from(JSON_FILES))
    right = json.loads((folder / name).read_bytes())
    if name == "tokenizer.json":  # of its hundreds of pieces few say more than the first
        right["model"]["vocab"] = dict(list(right["model"]["vocab"].items())[:300])
    (folder / name).write_text(as_json(data.draw(changed(right))))
    _train(orderly, folder, data_file, base / "odd-model-run")


@given(st.data())
def test_damaged_files_are_trained_or_refused(
    orderly,
    model_folder,
    data_file,
    tmp_path_factory,
    data,
):
    base = tmp_path_factory.getbasetemp()
    folder = copied(model_folder, base / "damaged-model")
    file = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.suffix != ".txt")))
    file.write_bytes(data.draw(st.one_of(damaged(file.read_bytes()), st.just(nested_json(100_000).encode()))))
    _train(orderly, folder, data_file, base / "damaged-model-run")


def _train(orderly, model, data, run):
    orderly("train", "--overwrite", *settings_of(model, data, run, max_steps=1))


@given(st.data())
def test_adapters_are_scored_or_refused(orderly, model_folder, finished_run, data):
    base = finished_run.parent
    adapter = copied(finished_run / "adapter", base / "odd-adapter")
    file = data.draw(
        st.sampled_from([adapter / "adapter_config.json", adapter / "adapter_model.safetensors"])
    )
    if file.suffix == ".json" and data.draw(st.booleans()):
        file.write_text(as_json(data.draw(changed(json.loads(file.read_bytes())))))
    else:
        file.write_bytes(data.draw(damaged(file.read_bytes())))
    questions = base / "questions.jsonl"
    questions.write_text('{"question": "What is 2 plus 2?", "answer": "4"}\n')
    out = base / "scored"
    shutil.rmtree(out, ignore_errors=True)
    words = ["score", "--model", str(model_folder), "--adapter", str(adapter), "--data", str(questions)]
    orderly(*words, "--out", str(out), "--max-new-tokens", "2")
