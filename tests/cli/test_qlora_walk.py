"""From a base folder by `fitune train` and `fitune export` to a merged model that transformers loads alone."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from models.tiny_models import beside_tokenizer, tiny_model

pytest.importorskip("bitsandbytes")

ALONE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
ids = tokenizer("What is 4 plus 5?", return_tensors="pt").input_ids
written = tokenizer.decode(model.generate(ids, max_new_tokens=4)[0])
assert not any(name.partition(".")[0] in ("fitune", "peft", "bitsandbytes") for name in sys.modules)
print(json.dumps({"ids": ids[0].tolist(), "logits": model(ids).logits[0].tolist(), "written": written}))
"""


def alone(folder):
    """What plain transformers makes of a folder, in a process that knows of nothing else."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    answered = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, str(folder)],
        env={**environment, "HF_HUB_OFFLINE": "1"}, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(answered.stdout.splitlines()[-1])


@pytest.fixture
def recipe(model_folder, data_file, tmp_path):
    """The ready recipe, on the tests' model and rows."""
    ready = Path(__file__).parents[2] / "recipes" / "demo_qlora_tiny.yaml"
    words = yaml.safe_load(ready.read_text(encoding="utf-8"))
    words |= {"model": str(model_folder), "data": str(data_file), "eval_data": str(data_file), "gpu": "cpu"}
    words |= {"seq_len": 64, "max_steps": 10, "learning_rate": 1e-2, "samples": 0}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**words, "output_dir": str(tmp_path / "run")}), encoding="utf-8")
    return file


def test_a_merged_model_is_the_base_and_its_adapter_without_fitune(
    recipe, model_folder, tmp_path, call
):  # fmt: skip
    """Trained on NF4, merged into the base as it is on disk: logits of base + adapter to 1e-5."""
    printed = call("train", recipe, "--export", "adapter").ends(0)
    assert f"adapter: {tmp_path / 'run' / 'adapter'}" in printed
    commands = printed.partition("next:    ")[2].splitlines()
    chat, score, export = (line.strip().partition("   ")[0] for line in commands[:3])
    assert chat == f"fitune chat {tmp_path / 'run'}"
    assert score.startswith(f"fitune score --model {tmp_path / 'run'} --data ")
    call(*export.split()[1:]).ends(0)
    found = alone(tmp_path / "run" / "merged")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.tensor([found["ids"]])
    with torch.no_grad():
        before = base(ids).logits[0]
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter"))(ids).logits[0]
    torch.testing.assert_close(torch.tensor(found["logits"]), adapted, rtol=0, atol=1e-5)
    assert (adapted - before).abs().max() > 0.1
    assert found["written"].startswith("What is 4 plus 5?")


def test_the_recipe_merges_by_itself_and_says_where(recipe, tmp_path, call):
    merged = tmp_path / "run" / "merged"
    printed = call("train", recipe).ends(0)
    assert f"merged model: {merged} (verified)" in printed
    assert "fitune export" not in printed, "there is nothing left to export"
    modes = {stat.S_IMODE(file.stat().st_mode) for file in merged.iterdir()}
    assert len(modes) == 1, "weights can be read by whoever reads the card"
    call("export", tmp_path / "run").ends(2, "merged its adapter already")


@pytest.mark.filterwarnings("ignore")
def test_experts_on_hqq_are_trained_saved_merged_and_read_again(recipe, model_folder, tmp_path, call):
    """Qwen3-30B-A3B's small twin: merged it is the 16-bit base and the adapter, for transformers and PEFT alone."""
    pytest.importorskip("hqq.core.quantize")
    mixture = tiny_model("qwen3_moe", vocab_size=384, hidden_size=64, moe_intermediate_size=64)
    twin = beside_tokenizer(mixture, model_folder, tmp_path / "twin")
    words = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    words |= {"model": str(twin), "quantization": "hqq", "lora_target_modules": ["all-linear", "experts"]}
    words |= {"save_steps": 5, "double_quantization": False, "lora_dropout": 0.0}
    recipe.write_text(yaml.safe_dump(words), encoding="utf-8")
    call("train", recipe, "--export", "adapter").ends(0)
    call("export", tmp_path / "run").ends(0)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["final_loss"] < report["first_loss"]
    found = alone(tmp_path / "run" / "merged")
    base = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter"))
        logits = adapted(torch.tensor([found["ids"]])).logits[0]
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, rtol=0, atol=1e-4)
