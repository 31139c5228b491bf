"""Models and adapters that would answer noise are refused, from Python as from the command line."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults.adapters import edit_config, edit_weights
from fitune.errors import CheckpointError, DataError, ModelError
from fitune.score.engines.engine import Sampling
from fitune.score.engines.opening import choose_dtype
from fitune.score.plan import ScorePlan
from fitune.score.questions import Input
from fitune.score.run import score
from fitune.values.plan import DataSource
from models.tiny_models import load, with_ids_moved_up
from score.scorings import quietly


@pytest.fixture
def data(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return DataSource(path=str(tmp_path / "rows.jsonl"))


def plan_for(model, data, out, adapter=None):
    return ScorePlan(
        model=str(model), sources=(data,), output_dir=str(out), adapter=str(adapter or ""),
        sampling=Sampling(max_new_tokens=2),
    )  # fmt: skip


def changed(folder, to, name_part, value):
    shutil.copytree(folder, to)
    file = next(to.glob("*.safetensors"))
    weights = load_file(file)
    name = next(name for name in weights if name_part in name)
    weights[name].view(-1)[0] = value
    save_file(weights, file, metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_base_whose_weights_are_no_numbers_is_refused(tiny, data, tmp_path, value):
    broken = changed(tiny.folder, tmp_path / "broken", "0.mlp.up_proj", value)
    with pytest.raises(ModelError, match=r"NaN or infinite: model.layers.0.mlp.up_proj.weight"):
        quietly(plan_for(broken, data, tmp_path / "out"))


@pytest.mark.parametrize("engine", ["transformers", "server"])
@pytest.mark.parametrize("listed", ['"</s>"', '{"id": 1}', "[1.5]"])
def test_a_model_whose_end_tokens_are_no_ids_is_refused_by_every_engine(tiny, data, tmp_path, engine, listed):
    model = shutil.copytree(tiny.folder, tmp_path / "model")
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {listed}}}')
    url = "http://127.0.0.1:9/v1" if engine == "server" else ""
    plan = replace(plan_for(model, data, tmp_path / "out"), engine=engine, url=url)
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id = .* must be a token's id"):
        quietly(plan)


@pytest.fixture
def adapter(tiny, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = load(tiny.folder)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: edit_config(folder, r=8), "does not fit"),
        # a config cannot know what stands before the block number; the model can
        (lambda folder: edit_weights(
            folder, lambda found: {n.replace("model.model.", "model.model.other."): t for n, t in found.items()}),
         "the base has no such linear"),
    ],
    ids=["rank", "names"],
)  # fmt: skip
def test_an_adapter_that_would_be_left_out_is_refused(tiny, data, tmp_path, adapter, change, words):
    change(adapter)
    with pytest.raises(CheckpointError, match=words):
        quietly(plan_for(tiny.folder, data, tmp_path / "out", adapter))
    assert words != "does not fit" or not (tmp_path / "out").exists()


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


def test_fields_of_no_format_name_their_row(tiny, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n{"left": "a", "right": "b"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: format auto"):
        list(Input(sources=(DataSource(path=str(rows)),)).questions())


@pytest.mark.parametrize("graders", [(), ("perplexity",)])
def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows(model_folder, tmp_path, data, graders):
    mixed = with_ids_moved_up(model_folder, tmp_path / "mixed", by=384)
    with pytest.raises(ModelError, match="the embedding has 384 rows"):
        score(replace(plan_for(mixed, data, tmp_path / "out"), graders=graders))
