"""From a base folder by `fitune train` and `fitune export` to a merged model that transformers loads alone."""

import json
import stat
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.tiny_models import beside_tokenizer, tiny_model

pytest.importorskip("bitsandbytes")


@pytest.fixture
def recipe(model_folder, data_file, tmp_path):
    """The ready recipe, on the tests' model and rows, written for a run of this name."""
    ready = Path(__file__).parents[2] / "recipes" / "demo_qlora_tiny.yaml"

    def write(name, **words):
        words = {
            **yaml.safe_load(ready.read_text(encoding="utf-8")), "model": str(model_folder), "data": str(data_file),
            "eval_data": f"{data_file}#8", "gpu": "cpu", "seq_len": 64, "max_steps": 10, "learning_rate": 1e-2,
            "samples": 0, "output_dir": str(tmp_path / name), **words,
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(words), encoding="utf-8")
        return tmp_path / f"{name}.yaml"

    return write


@pytest.mark.filterwarnings("ignore")
def test_merged_models_are_the_base_and_its_adapter_without_fitune(recipe, model_folder, tmp_path, call):
    """Trained on NF4, merged into the base as it is on disk; and experts on HQQ, Qwen3-30B-A3B's small twin: logits
    of base + adapter by PEFT alone."""
    printed = call("train", recipe("nf4"), "--export", "adapter").ends(0)
    assert f"adapter: {tmp_path / 'nf4' / 'adapter'}" in printed
    commands = printed.partition("next:    ")[2].splitlines()
    chat, score, export = (line.strip().partition("   ")[0] for line in commands[:3])
    assert chat == f"fitune chat {tmp_path / 'nf4'}"
    assert score.startswith(f"fitune score --model {tmp_path / 'nf4'} --data ")
    call(*export.split()[1:]).ends(0)
    bases = {"nf4": (model_folder, 1e-5)}
    if find_spec("hqq"):
        mixture = tiny_model("qwen3_moe", vocab_size=384, hidden_size=64, moe_intermediate_size=64)
        bases["hqq"] = beside_tokenizer(mixture, model_folder, tmp_path / "twin"), 1e-4
        words = {
            "model": str(bases["hqq"][0]), "quantization": "hqq", "lora_target_modules": ["all-linear", "experts"],
            "save_steps": 5, "double_quantization": False, "lora_dropout": 0.0,
        }  # fmt: skip
        call("train", recipe("hqq", **words), "--export", "adapter").ends(0)
        call("export", tmp_path / "hqq").ends(0)
        report = json.loads((tmp_path / "hqq" / "report.json").read_text())
        assert report["final_loss"] < report["first_loss"]
    for name, (folder, tolerance) in bases.items():
        merged = tmp_path / name / "merged"
        config = json.loads((merged / "config.json").read_text())
        assert not {"quantization_config", "auto_map"} & config.keys()
        assert not (merged / "adapter_config.json").exists()  # with one, transformers would load it by PEFT
        tokenizer = AutoTokenizer.from_pretrained(merged)
        ids = tokenizer("What is 4 plus 5?", return_tensors="pt").input_ids
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(merged)(ids).logits
            before = base(ids).logits
            adapted = PeftModel.from_pretrained(base, str(tmp_path / name / "adapter"))(ids).logits
        torch.testing.assert_close(logits, adapted, rtol=0, atol=tolerance)
        assert (adapted - before).abs().max() > 0.05
        assert tokenizer.decode(ids[0]) == "What is 4 plus 5?"


def test_the_recipe_merges_by_itself_and_says_where(recipe, tmp_path, call):
    merged = tmp_path / "run" / "merged"
    printed = call("train", recipe("run", max_steps=2)).ends(0)
    assert f"merged model: {merged} (verified)" in printed
    assert "fitune export" not in printed, "there is nothing left to export"
    modes = {stat.S_IMODE(file.stat().st_mode) for file in merged.iterdir()}
    assert len(modes) == 1, "weights can be read by whoever reads the card"
    call("export", tmp_path / "run").ends(2, "merged its adapter already")
